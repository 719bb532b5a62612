"""`python -m cppmega.run SCRIPT ARGS`: run a training script with the overlay proved in it.

Under torchrun: `torchrun --nproc_per_node 8 -m cppmega.run SCRIPT ARGS`. In every rank it checks
the tree, arms the runtime patches, compares the ranks before the first step, and stops the run
after it if a patch that had to be reached was not. `-m MODULE` instead of SCRIPT runs a module, as
`python -m` does: cppmega's trainer is one, so an installed wheel can train without a checkout.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import click

from cppmega.errors import CppmegaError

_TAKE_A_WORD = ("--megatron", "--accept", "--allow-wrapper", "--allow-fallback")
_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@dataclass(frozen=True, slots=True)
class RunCommand:
    """One command line of `cppmega.run`."""

    script: str
    """A file, or the name of a module."""
    arguments: tuple[str, ...]
    is_module: bool
    root: Path | None
    edits: tuple[str, ...]
    no_steps: bool
    wrappers: tuple[str, ...]
    fallbacks: tuple[str, ...]


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
    help="Accept this wrapper around patched code, or all that match a pattern such as "
    "'framework.*:*'; the run's log names each.",
)
@click.option(
    "--allow-fallback",
    "fallbacks",
    multiple=True,
    metavar="PAGE",
    help="Let Megatron's own code compute what this patch declines; repeatable.",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=lambda _context, _option, on: on and os.environ.update(CPPMEGA_VERBOSE="1"),
    help="Name every patch that the first step has reached, or need not reach.",
)
@click.option("-m", "module", metavar="MODULE", help="Run this module, as `python -m` does.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def run(
    root: Path | None,
    edits: tuple[str, ...],
    no_steps: bool,
    wrappers: tuple[str, ...],
    fallbacks: tuple[str, ...],
    module: str | None,
    words: tuple[str, ...],
) -> RunCommand:
    """Run a training SCRIPT, or a module, with the overlay armed and proved in every rank.

    Works under plain python and under torchrun. A script with its own loop marks its steps with
    `cppmega.guard.steps`; Megatron's `train_step` is found automatically.
    """
    script, arguments = (module, words) if module else (words[0] if words else "", words[1:])
    if not (_is_module(script) if module else _is_script(script)):
        raise CppmegaError(
            "no-script",
            f"{script or 'nothing'} is not a {'module that can be found' if module else 'file'}.",
            "There is nothing to run.",
            "python -m cppmega.run SCRIPT ARGS, or python -m cppmega.run -m MODULE ARGS",
        )
    return RunCommand(
        script, tuple(arguments), bool(module), root, edits, no_steps, wrappers, fallbacks
    )


def _execute(command: RunCommand) -> int:
    """Run the script and judge its end. Returns the exit status."""
    from cppmega import calls, guard
    from cppmega.guard import allowed
    from cppmega.guard import end as run_end
    from cppmega.host import allocator, console, next_command
    from cppmega.tree import accepted

    script = command.script
    if not command.is_module and _is_application(script):
        script = str(Path(script).absolute())  # wherever the script goes
        del sys.path[0]  # runpy puts a folder or an archive there itself
    elif not (command.is_module or sys.flags.safe_path):
        # As `python SCRIPT` does: the script's folder first, not the working directory.
        sys.path[0] = str(Path(script).resolve().parent)
    if (node := run_end.end_record.node_of_this_rank()) is not None:
        from cppmega.runs import placeholders

        filled = placeholders.filled(command.arguments, node.run.path, node.run.outline.load)
        command = replace(command, arguments=filled)
    sys.argv = [command.script, *command.arguments]
    allocator.set_in(os.environ)  # before anything imports torch
    run_end.watch(command.arguments, no_steps=command.no_steps)
    allowed.allow(command.wrappers)
    accepted.accept(accepted.parse(command.edits))
    calls.allow(command.fallbacks)
    try:
        guard.start(command.root, trains=not command.no_steps)
    except CppmegaError as error:
        error.next = next_command.carrying(error.next, command.root)
        raise
    except OSError as error:
        raise console.of_system(error) from error
    except KeyboardInterrupt:
        raise CppmegaError(
            "stopped", "Stopped from the keyboard.", "The script did not begin.", "run it again"
        ) from None
    try:
        if command.is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        run_end.returned(stop)
        raise
    return run_end.returned(None)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _is_script(path: str) -> bool:
    """Whether Python can run a path: a file, or a folder or an archive with a `__main__`."""
    try:
        return _is_application(path) or (
            pkgutil.get_importer(path) is None and Path(path).is_file()
        )
    except OSError:  # a name that is too long
        return False


def _is_application(path: str) -> bool:
    finder = pkgutil.get_importer(path) if path else None
    return finder is not None and finder.find_spec("__main__") is not None


def _ending_options(words: Sequence[str]) -> list[str]:
    """Insert `--` after `-m MODULE`: like Python's own `-m`, it ends the options."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        if words[at] == "-m":
            return [*words[: at + 2], "--", *words[at + 2 :]]
        at += 2 if words[at] in _TAKE_A_WORD else 1
    return list(words)


def _configured() -> list[str]:
    from cppmega.host import configuration, console

    here = configuration.read()
    words = here.words({option for parameter in run.params for option in parameter.opts})
    if words:
        console.say(here.said(words))
    return words


def main() -> NoReturn:
    """Run the command; errors name the host and the rank."""
    from cppmega.guard import end as run_end
    from cppmega.guard import end_record as end_record
    from cppmega.guard import error_file

    if end_record.node_of_this_rank() is not None:
        from cppmega.host.process import end_with_parent

        end_with_parent()
    with error_file.reported(run_end.failed):
        # click only reads the command line: it would interpret what a script may raise.
        words = [*_configured(), *_ending_options(sys.argv[1:])]
        command = run.main(words, prog_name="python -m cppmega.run", standalone_mode=False)
        sys.exit(_execute(command) if isinstance(command, RunCommand) else 0)


if __name__ == "__main__":
    main()
