"""The console: `cppmega`, `python -m cppmega` and `python -m cppmega.apply_patches`.

Commands import what they need when they run, so that `list`, `explain`, `status` and `diff` start
fast and work in a broken environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from cppmega import __version__
from cppmega.errors import CppmegaError

F = TypeVar("F", bound=Callable[..., Any])

FINE, NOT_AS_IT_MUST_BE, INTERNAL = 0, 1, 2


class _Commands(click.Group):
    """Commands in the order in which a user meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cppmega")
def cli() -> None:
    """Version-pinned patches for an installed Megatron-LM, and the proof that they train.

    After every Megatron upgrade: `python -m cppmega.apply_patches`. Exit status: 0 fine,
    1 something is not as it must be, 2 wrong usage or an internal error.
    """


def _tree_options(command: F) -> F:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        click.option(
            "--patches",
            type=click.Path(path_type=Path, file_okay=False),
            multiple=True,
            help="A catalogue of your own beside ours; may be given more than once.",
        ),
        click.option(
            "--megatron",
            "root",
            type=click.Path(path_type=Path),
            metavar="ROOT",
            help="Folder that holds megatron/ (default: the one Python would import).",
        ),
    ):
        command = option(command)
    return command


def _session(root: Path | None, patches: Sequence[Path]) -> Any:
    from cppmega import report
    from cppmega.overlay import Session

    return Session(root, patches or None, report.say)


def _answer(outcome: Any, as_json: bool, ok: bool, closing: str) -> NoReturn:
    from cppmega import report

    if as_json:
        report.print_json(report.as_json(outcome, ok))
    else:
        report.print_verdicts(outcome.verdicts)
        for note in outcome.notes:
            report.say(f"note: {note}")
        report.say(closing)
    sys.exit(FINE if ok else NOT_AS_IT_MUST_BE)


@cli.command()
@_tree_options
@click.option("--only", multiple=True, metavar="NAME", help="Apply these pages and no others.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if something would be written.")
def apply(
    root: Path | None, patches: Sequence[Path], as_json: bool, only: Sequence[str], check: bool
) -> None:
    """Put every patch into the installed Megatron, or change nothing."""
    from cppmega import overlay, report

    session = _session(root, patches)
    if not as_json:
        report.say(f"megatron-core {session.tree.version} in {session.root}")
    outcome = overlay.apply(session, only=only, check=check)
    ok = outcome.ok and not (check and (outcome.changed or outcome.receipt_changed))
    verb = "would change" if check else "changed"
    closing = f"{report.summary(outcome.verdicts)}; {verb} {len(outcome.changed)} files"
    if outcome.plan.failures:
        closing = f"{report.summary(outcome.verdicts)}; nothing was changed"
    elif outcome.digest:
        closing += f"; overlay {outcome.digest}"
    _answer(outcome, as_json, ok, closing)


@cli.command(name="list")
@click.option("--patches", type=click.Path(path_type=Path, file_okay=False), multiple=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_pages(patches: Sequence[Path], as_json: bool) -> None:
    """Every page of the catalogue: name, kind, what it does."""
    from cppmega import catalogue, report

    pages = catalogue.load(patches)
    if as_json:
        rows = [
            {"name": p.name, "kind": p.patch.kind, "gate": p.patch.gate, **p.labels}
            for p in pages.values()
        ]
        report.print_json({"schema": 1, "ok": True, "patches": rows})
        return
    width = max((len(name) for name in pages), default=0)
    for name, page in sorted(pages.items()):
        gate = f" [{page.patch.gate}=1]" if page.patch.gate else ""
        click.echo(f"{name:<{width}}  {page.doc.strip().splitlines()[0]}{gate}")


@cli.command()
@click.argument("name")
@click.option("--patches", type=click.Path(path_type=Path, file_okay=False), multiple=True)
def explain(name: str, patches: Sequence[Path]) -> None:
    """What a page does, why, and which texts it knows."""
    from cppmega import catalogue

    page = catalogue.get(catalogue.load(patches), name)
    click.echo(f"{name} ({page.patch.kind}), revision {page.revision}\n")
    click.echo(page.doc.strip() + "\n")
    click.echo(f"Reached:  {page.patch.reached}")
    click.echo(f"Gate:     {page.patch.gate or 'always on'}")
    click.echo(f"Verify needs: {', '.join(page.patch.needs)}")
    for edit in page.patch.edits:
        click.echo(f"Target:   {edit.target}")
        for version, pin in edit.pins.items():
            click.echo(f"          {version:<14} {pin}")


@cli.command()
@_tree_options
def status(root: Path | None, patches: Sequence[Path], as_json: bool) -> None:
    """The state of every patch; writes nothing."""
    from cppmega import overlay, report

    session = _session(root, patches)
    outcome = overlay.status(session)
    closing = report.summary(outcome.verdicts)
    if outcome.digest:
        closing += f"; overlay {outcome.digest}"
    _answer(outcome, as_json, outcome.ok, closing)


@cli.command()
@click.argument("name", required=False)
@_tree_options
def diff(name: str | None, root: Path | None, patches: Sequence[Path], as_json: bool) -> None:
    """The change to the pristine text: of every patch, or of one."""
    from cppmega import overlay, report

    text = overlay.diff(_session(root, patches), name, os.environ)
    if as_json:
        report.print_json({"schema": 1, "ok": True, "diff": text})
        return
    for line in text.splitlines():
        code = {"+": "32", "-": "31", "@": "36"}.get(line[:1], "")
        click.echo(report.coloured(line, code))


@cli.command()
@click.argument("names", nargs=-1)
@_tree_options
def revert(names: Sequence[str], root: Path | None, patches: Sequence[Path], as_json: bool) -> None:
    """Restore the exact bytes of upstream: of every patch, or take single patches out."""
    from cppmega import overlay, report

    outcome = overlay.revert(_session(root, patches), names)
    ok = not outcome.plan.failures and (outcome.ok or not names)
    closing = f"{report.summary(outcome.verdicts)}; changed {len(outcome.changed)} files"
    _answer(outcome, as_json, ok, closing)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command; every error is four lines on stderr, or one JSON object with `--json`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = cli.main(given, prog_name="cppmega", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else FINE)
    except CppmegaError as error:
        _fail(error, NOT_AS_IT_MUST_BE, given)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        what = error.format_message()
        wrong = CppmegaError("wrong-usage", what, "Nothing was done.", "cppmega --help")
        _fail(wrong, INTERNAL, given)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FINE)


def _fail(error: CppmegaError, code: int, given: Sequence[str]) -> NoReturn:
    from cppmega import report

    if "--json" in given:
        report.print_json(report.error_json(error))
    else:
        print(error.render(), file=sys.stderr)
    sys.exit(code)
