"""What all commands share: the group, the options that choose a tree, the way to answer."""

from __future__ import annotations

import functools
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import click

from cppmega import __version__
from cppmega.errors import CppmegaError

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


_NEXT = re.compile(
    r"(python -m cppmega\.apply_patches|cppmega "
    r"(?:apply|list|explain|status|diff|verify|revert|drift|pin|preflight))\b"
)


def carrying(text: str, catalogues: Iterable[Path]) -> str:
    """The commands in a text with the user's catalogues: without them they name other patches."""
    options = "".join(f" --patches {shlex.quote(str(folder))}" for folder in catalogues)
    if not options or " --patches" in text:
        return text
    return _NEXT.sub(lambda command: command[0] + options, text)


def patches_option(command: F) -> F:
    """`--patches`, which the next command of an error then has too."""

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
        help="A catalogue of your own beside ours; may be given more than once.",
    )
    return cast(F, option(passing_on))


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
    from cppmega.host import console
    from cppmega.overlay.verbs import Session

    return Session(root, patches or None, console.say)


def answer(session: Any, outcome: Any, as_json: bool, ok: bool, closing: str) -> NoReturn:
    from cppmega.cli import verdicts as cli_verdicts
    from cppmega.host import console

    for name, verdict in outcome.plan.verdicts.items():
        said = (carrying(text, session.catalogues) for text in (verdict.detail, verdict.next))
        outcome.plan.verdicts[name] = replace(
            verdict, **dict(zip(("detail", "next"), said, strict=True))
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
