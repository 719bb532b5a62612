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
from pathlib import Path

import click

from cppmega.errors import CppmegaError

_TAKE_A_WORD = ("--megatron", "--accept")
_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


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
@click.option("-m", "module", metavar="MODULE", help="Run this module, as `python -m` does.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def run(
    root: Path | None,
    edits: tuple[str, ...],
    no_steps: bool,
    module: str | None,
    words: tuple[str, ...],
) -> None:
    """Run a training SCRIPT, or a module, with the overlay armed and proved in every rank.

    Works under plain python and under torchrun. The script's own loop says where its steps are
    with `cppmega.guard.steps`; Megatron's `train_step` is found by itself.
    """
    from cppmega import accepted, allocator, guard

    script, arguments = (module, words) if module else (words[0] if words else "", words[1:])
    if not (_is_module(script) if module else Path(script).is_file()):
        raise CppmegaError(
            "no-script",
            f"{script or 'nothing'} is not a {'module that can be found' if module else 'file'}.",
            "There is nothing to run.",
            "python -m cppmega.run SCRIPT ARGS, or python -m cppmega.run -m MODULE ARGS",
        )
    if not module:
        # What `python SCRIPT` would have: the script's folder first, not the working directory.
        sys.path[0] = str(Path(script).resolve().parent)
    sys.argv = [script, *arguments]
    allocator.set_in(os.environ)  # before anything imports torch
    accepted.accept(accepted.parse(edits))
    guard.start(root)
    if module:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")
    if not no_steps:
        guard.finish()


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


def main() -> None:
    """Run, with errors as four lines that name host and rank."""
    from cppmega import failure

    if os.environ.get("CPPMEGA_RUN"):
        from cppmega.process import end_with_parent

        end_with_parent()
    try:
        run.main(
            _ending_options(sys.argv[1:]), prog_name="python -m cppmega.run", standalone_mode=False
        )
    except CppmegaError as error:
        from cppmega import guard

        failure.record(error)
        print(f"[{guard.where()}]\n{error.render()}", file=sys.stderr, flush=True)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except Exception as error:
        failure.record(error)
        raise
    finally:
        _close_gloo()


def _close_gloo() -> None:
    """Close what a script left open: gloo's threads abort a process that ends around them.

    One run in five so ended with SIGABRT after its last step. NCCL does not, and closing it in a
    rank that failed would wait for the others.
    """
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
