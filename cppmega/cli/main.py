"""The entry point of `cppmega`, `python -m cppmega` and `python -m cppmega.apply_patches`.

Commands import what they need when they run, so that `list`, `explain`, `status` and `diff` start
fast and work in a broken environment.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from cppmega.cli import authoring as cli_authoring
from cppmega.cli import checkpoint as cli_checkpoint
from cppmega.cli import preflight as cli_preflight
from cppmega.cli import prove as cli_prove
from cppmega.cli import recipes as cli_recipes
from cppmega.cli import runs as cli_runs
from cppmega.cli import tree as cli_tree
from cppmega.cli.group import FINE, INTERNAL, NOT_AS_IT_MUST_BE, cli
from cppmega.errors import CppmegaError
from cppmega.host import console, interrupts

STOPPED = 130
"""Exit status of a process killed by SIGINT, as shells report it."""

__all__ = [
    "cli",
    "cli_authoring",
    "cli_checkpoint",
    "cli_preflight",
    "cli_prove",
    "cli_recipes",
    "cli_runs",
    "cli_tree",
    "main",
]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command; an error is four lines on stderr, or one JSON object with `--json`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    console.hold_standard_streams()
    with console.whole_answer():
        _run(words)
    raise AssertionError("a command exits")


def _run(words: list[str]) -> NoReturn:
    try:
        interrupts.raise_pending()
        code = cli.main(words or ["--help"], prog_name="cppmega", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else FINE)
    except CppmegaError as error:
        _fail(error, NOT_AS_IT_MUST_BE, words)
    except (click.exceptions.Abort, KeyboardInterrupt):
        what = "Stopped from the keyboard."
        stopped = CppmegaError("stopped", what, "The work is incomplete.", "run the command again")
        _fail(stopped, STOPPED, words)
    except click.ClickException as error:
        what = error.format_message()
        wrong = CppmegaError("wrong-usage", what, "Nothing was done.", "cppmega --help")
        _fail(wrong, INTERNAL, words)
    except Exception as error:
        if isinstance(error, FileNotFoundError) and _folder_gone():
            what = "The working directory of this shell no longer exists."
            gone = CppmegaError("folder-gone", what, "Relative paths cannot be resolved.", "cd ~")
            _fail(gone, NOT_AS_IT_MUST_BE, words)
        if isinstance(error, OSError) and (error.filename or error.errno in console.UNWRITABLE):
            _fail(
                console.of_system(error), NOT_AS_IT_MUST_BE if error.filename else INTERNAL, words
            )
        import traceback

        traceback.print_exc()
        what = f"{type(error).__name__}: {error}"
        broken = CppmegaError("internal-error", what, "This is a bug.", "report it with the above")
        _fail(broken, INTERNAL, words)


def _folder_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _fail(error: CppmegaError, code: int, words: Sequence[str]) -> NoReturn:
    if "--json" in words:
        console.print_json(console.error_json(error))
    else:
        console.say(error.render())
    sys.exit(code)
