"""Completion of names in a shell, and the command that prints the script for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from cppmega.cli.group import cli

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_CPPMEGA_COMPLETE"
"""The variable with which the shell's script requests completions; click reads it."""


def patches(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of patches, with their titles; the pages are not executed."""
    return list(_patches(ctx, incomplete))


def _patches(ctx: click.Context, incomplete: str) -> Iterator[CompletionItem]:
    from cppmega.catalogue import loader as catalogue

    chosen = ctx.params.get("names") or ctx.params.get("only") or ()
    for folder in (catalogue.builtin_folder(), *(ctx.params.get("patches") or ())):
        with contextlib.suppress(OSError):
            for name, file in catalogue.page_files(Path(folder)):
                if name.startswith(incomplete) and name not in chosen:
                    yield CompletionItem(name, help=_title(file))


def _title(page: Path) -> str:
    with page.open(encoding="utf-8", errors="replace") as file:
        return file.readline().strip().strip('"').rstrip(".")


def recipes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the shipped recipes; files if no name has this prefix."""
    from cppmega.recipe import index

    return _or_files(index.shipped(), incomplete)


def runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of run folders, the newest first; files if no name has this prefix."""
    from cppmega.runs import folder as run_folder

    with contextlib.suppress(OSError):
        manifests = run_folder.root(ctx.params.get("folder")).glob("*/manifest.json")
        newest = sorted(manifests, key=lambda file: file.stat().st_mtime, reverse=True)
        return _or_files((file.parent.name for file in newest), incomplete)
    return []


def _or_files(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    fitting = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return fitting or [CompletionItem(incomplete, type="file")]


@cli.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script for completion with Tab in your shell.

    Commands, options, patches, recipes and runs are completed. Install it once:

    \b
    bash   cppmega completion bash > ~/.local/share/bash-completion/completions/cppmega
    zsh    cppmega completion zsh > "${fpath[1]}/_cppmega"
    fish   cppmega completion fish > ~/.config/fish/completions/cppmega.fish

    Then start a new shell. Without the package bash-completion, add this line to ~/.bashrc:
    eval "$(cppmega completion bash)"
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "cppmega", _VARIABLE).source())
