"""What all commands share: the group, the options that choose a tree, the way to answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from cppmega import __version__

F = TypeVar("F", bound=Callable[..., Any])

FINE, NOT_AS_IT_MUST_BE, INTERNAL = 0, 1, 2


_ORDER = (
    *("apply", "list", "explain", "status", "diff", "verify", "drift", "revert"),
    *("recipes", "preflight", "launch", "runs", "attach", "logs", "stop", "compare"),
)


class _Commands(click.Group):
    """Commands in the order in which a user meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.commands, key=lambda name: (*_ORDER, name).index(name))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cppmega")
def cli() -> None:
    """Version-pinned patches for an installed Megatron-LM, and the proof that they train.

    After every Megatron upgrade: `python -m cppmega.apply_patches`. Exit status: 0 fine,
    1 something is not as it must be, 2 wrong usage or an internal error.
    """


patches_option = click.option(
    "--patches",
    type=click.Path(path_type=Path, file_okay=False),
    multiple=True,
    help="A catalogue of your own beside ours; may be given more than once.",
)


def tree_options(command: F) -> F:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        patches_option,
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


def session_of(root: Path | None, patches: Sequence[Path]) -> Any:
    from cppmega import report
    from cppmega.overlay import Session

    return Session(root, patches or None, report.say)


def answer(outcome: Any, as_json: bool, ok: bool, closing: str) -> NoReturn:
    from cppmega import report

    with report.answering():
        if as_json:
            report.print_json(report.as_json(outcome, ok))
        else:
            report.print_verdicts(outcome.verdicts)
    if not as_json:
        for note in outcome.notes:
            report.say(f"note: {note}")
        report.say(closing)
    sys.exit(FINE if ok else NOT_AS_IT_MUST_BE)
