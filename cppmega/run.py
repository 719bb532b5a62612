"""`python -m cppmega.run SCRIPT ARGS`: run a training script with the overlay proved in it.

Under torchrun: `torchrun --nproc_per_node 8 -m cppmega.run SCRIPT ARGS`. In every rank it checks
the tree, arms the runtime patches, compares the ranks before the first step, and after it stops the
run when a patch that had to be reached was not. `-m MODULE` instead of SCRIPT runs a module, as
`python -m` does: our own trainer is one, so an installed wheel can train without a checkout.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import click

from cppmega.errors import CppmegaError

_TAKE_A_WORD = ("--megatron", "--accept", "--allow-wrapper")
_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@dataclass(frozen=True, slots=True)
class Asked:
    """One command line."""

    script: str
    """A file, or the name of a module."""
    arguments: tuple[str, ...]
    is_module: bool
    root: Path | None
    edits: tuple[str, ...]
    no_steps: bool
    wrappers: tuple[str, ...]


@click.command(context_settings={**_SETTINGS, "help_option_names": ["-h", "--help"]})
@click.option(
    "--megatron",
    "root",
    type=click.Path(path_type=Path),
    metavar="ROOT",
    help="Import megatron from this folder and no other (default: the one Python would import).",
)
@click.option(
    "--accept",
    "edits",
    multiple=True,
    metavar="FILE=SHA256",
    help="Train this edited file of Megatron; repeatable.",
)
@click.option("--no-steps", is_flag=True, help="The script does not train: do not wait for a step.")
@click.option(
    "--allow-wrapper",
    "wrappers",
    multiple=True,
    metavar="MODULE:QUALNAME",
    help="Accept this wrapper around patched code; the run's log names it.",
)
@click.option("-m", "module", metavar="MODULE", help="Run this module, as `python -m` does.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def run(
    root: Path | None,
    edits: tuple[str, ...],
    no_steps: bool,
    wrappers: tuple[str, ...],
    module: str | None,
    words: tuple[str, ...],
) -> Asked:
    """Run a training SCRIPT, or a module, with the overlay armed and proved in every rank.

    Works under plain python and under torchrun. The script's own loop says where its steps are
    with `cppmega.guard.steps`; Megatron's `train_step` is found by itself.
    """
    script, arguments = (module, words) if module else (words[0] if words else "", words[1:])
    if not (_is_module(script) if module else Path(script).is_file()):
        raise CppmegaError(
            "no-script",
            f"{script or 'nothing'} is not a {'module that can be found' if module else 'file'}.",
            "There is nothing to run.",
            "python -m cppmega.run SCRIPT ARGS, or python -m cppmega.run -m MODULE ARGS",
        )
    return Asked(script, tuple(arguments), bool(module), root, edits, no_steps, wrappers)


def _execute(asked: Asked) -> int:
    """Run the script to its end, and look whether it was one; answers the exit status."""
    from cppmega import guard
    from cppmega.ending import judge as run_end
    from cppmega.host import allocator
    from cppmega.live import vouched
    from cppmega.tree import accepted

    if not (asked.is_module or sys.flags.safe_path):
        # What `python SCRIPT` would have: the script's folder first, not the working directory.
        sys.path[0] = str(Path(asked.script).resolve().parent)
    sys.argv = [asked.script, *asked.arguments]
    allocator.set_in(os.environ)  # before anything imports torch
    run_end.watch(asked.arguments, no_steps=asked.no_steps)
    vouched.allow(asked.wrappers)
    accepted.accept(accepted.parse(asked.edits))
    guard.start(asked.root)
    try:
        if asked.is_module:
            runpy.run_module(asked.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(asked.script, run_name="__main__")
    except SystemExit as stop:
        run_end.returned(stop)
        raise
    return run_end.returned(None)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _ending_options(words: Sequence[str]) -> list[str]:
    """The words with `--` behind `-m MODULE`: like Python's own, it ends the options."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        if words[at] == "-m":
            return [*words[: at + 2], "--", *words[at + 2 :]]
        at += 2 if words[at] in _TAKE_A_WORD else 1
    return list(words)


def main() -> NoReturn:
    """Run the command; errors name the host and the rank."""
    from cppmega.ending import judge as run_end
    from cppmega.ending import record as end_record
    from cppmega.rank import error_file

    if end_record.node_of_this_rank() is not None:
        from cppmega.host.process import end_with_parent

        end_with_parent()
    with error_file.reported(run_end.failed):
        # click only reads the command line: it would interpret what a script may raise.
        asked = run.main(
            _ending_options(sys.argv[1:]), prog_name="python -m cppmega.run", standalone_mode=False
        )
        sys.exit(_execute(asked) if isinstance(asked, Asked) else 0)


if __name__ == "__main__":
    main()
