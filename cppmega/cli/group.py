"""The command group, the options that choose a tree, and the answer of commands on a tree."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import click

from cppmega import __version__
from cppmega.errors import CppmegaError
from cppmega.host import command_words, console, next_command

if TYPE_CHECKING:
    from cppmega.overlay.verbs import Outcome, Session

F = TypeVar("F", bound=Callable[..., Any])

FINE, NOT_AS_IT_MUST_BE, INTERNAL = 0, 1, 2
"""Exit statuses: success, a failed check, and wrong usage or an internal error."""

_SECTIONS = {
    "Patches": ("apply", "list", "explain", "status", "diff", "verify", "drift", "revert"),
    "Training": (
        "doctor",
        "recipes",
        "advise",
        "preflight",
        "launch",
        "runs",
        "attach",
        "logs",
        "stop",
        "profile",
        "compare",
        "checkpoint",
    ),
    "Writing patches": ("new", "pin", "port", "export"),
    "This shell": ("completion",),
}


class _Commands(click.Group):
    """Commands in sections, in the order in which a user needs them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command, and put what the configuration sets before its words."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is None or ctx.resilient_parsing or command.name == "completion":
            return name, command, rest
        from cppmega.host import configuration

        here = configuration.read()
        options = {option for parameter in command.params for option in parameter.opts}
        if "--only" in rest:  # names every patch
            options -= {"--kind", "--without"}
        words = here.words(options)
        words += here.launch_words() if command.name == "launch" else []
        if words and not set(ctx.help_option_names) & set(rest):
            console.say(here.said(words))
        return name, command, [*words, *rest]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in _SECTIONS.values() for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in _SECTIONS.items():
            with formatter.section(title):
                rows = [(name, self.commands[name].get_short_help_str(70)) for name in names]
                formatter.write_dl(rows)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cppmega")
def cli() -> None:
    """Patch an installed Megatron-LM, prove the patches, and train with them.

    Run `python -m cppmega.apply_patches` after every Megatron upgrade, and `cppmega COMMAND --help`
    for the details of a command. Exit status: 0 success, 1 a check failed, 2 wrong usage or an
    internal error.
    """


class UpToDashes(click.Command):
    """A command whose words after `--` are Megatron's, including those that click knows."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        mine, ctx.meta[_MEGATRONS] = command_words.split(args)
        return super().parse_args(ctx, list(mine))


def after_dashes() -> tuple[str, ...]:
    """The words after `--` of the current command, which is an `UpToDashes`."""
    return cast(tuple[str, ...], click.get_current_context().meta[_MEGATRONS])


_MEGATRONS = f"{__name__}.megatrons"


def arguments_options(command: F) -> F:
    """Give a command the options of a script that adds arguments to Megatron's parser."""
    unknown = click.option(
        "--unknown-arguments",
        type=click.Choice(("refuse", "allow")),
        default="refuse",
        show_default=True,
        help="Refuse what Megatron's parser does not know, or list it and leave it to the script.",
    )
    added = click.option(
        "--arguments-from",
        multiple=True,
        metavar="MODULE[:FUNCTION]",
        help="Import what the script imports before Megatron's parser is built. FUNCTION(parser) "
        "adds arguments, as an extra_args_provider does; FUNCTION() returns such a function. "
        "Repeatable.",
    )
    return unknown(added(command))


def carrying(text: str, catalogues: Iterable[Path]) -> str:
    """Add the user's catalogues, and the tree of this command, to the commands in a text."""
    context = click.get_current_context(silent=True)
    root = context.params.get("root") if context is not None else None
    return next_command.carrying(text, root if isinstance(root, Path) else None, catalogues)


def patches_option(command: F) -> F:
    """Add `--patches` to a command, and to the next command of the errors that it raises."""

    @functools.wraps(command)
    def passing_on(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except CppmegaError as error:
            error.next = carrying(error.next, kwargs["patches"])
            raise

    option = click.option(
        "--patches",
        type=click.Path(path_type=Path, file_okay=False),
        multiple=True,
        help="A catalogue of your own, a folder or the name of an installed one, in addition to "
        "the shipped one and to those that were applied before; repeatable.",
    )
    return cast(F, option(passing_on))


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
"""`--json`, which every command with an answer accepts."""


root_option = click.option(
    "--megatron",
    "root",
    type=click.Path(path_type=Path),
    metavar="ROOT",
    help="Folder that holds megatron/ (default: the one Python would import).",
)


def tree_options(command: F) -> F:
    """Add the options that choose a tree and its catalogues, and `--json`."""
    for option in (json_option, patches_option, root_option):
        command = option(command)
    return command


def session_of(
    root: Path | None, patches: Sequence[Path], forgotten: Sequence[Path] = ()
) -> Session:
    """Open the tree that the options choose."""
    from cppmega.overlay.verbs import Session

    return Session(root, patches or None, console.say, forgotten)


def answer(session: Session, outcome: Outcome, as_json: bool, ok: bool, closing: str) -> NoReturn:
    """Print the outcome of a command on a tree, and exit with its status."""
    from cppmega.cli import verdicts as cli_verdicts

    catalogues = session.catalogues or ()
    for name, verdict in outcome.plan.verdicts.items():
        outcome.plan.verdicts[name] = replace(
            verdict,
            detail=carrying(verdict.detail, catalogues),
            next=carrying(verdict.next, catalogues),
        )
    with console.answering():
        if as_json:
            console.print_json(cli_verdicts.as_json(outcome, ok))
        else:
            cli_verdicts.print_verdicts(outcome.verdicts)
    if not as_json:
        for note in outcome.notes:
            console.say(f"note: {note}")
        console.say(closing)
    sys.exit(FINE if ok else NOT_AS_IT_MUST_BE)
