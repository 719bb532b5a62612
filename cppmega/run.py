"""`python -m cppmega.run SCRIPT ARGS`: run a training script with the overlay proved in it.

Under torchrun: `torchrun --nproc_per_node 8 -m cppmega.run SCRIPT ARGS`. In every rank it checks
the tree, arms the runtime patches, compares the ranks before the first step, and after it stops the
run when a patch that had to be reached was not.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import click

from cppmega.errors import CppmegaError

_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(context_settings={**_SETTINGS, "help_option_names": ["-h", "--help"]})
@click.option(
    "--megatron",
    "root",
    type=click.Path(path_type=Path),
    metavar="ROOT",
    help="Import megatron from this folder and no other (default: the one Python would import).",
)
@click.option("--no-steps", is_flag=True, help="The script does not train: do not wait for a step.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(root: Path | None, no_steps: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run a training SCRIPT with the overlay armed, and proved in every rank.

    Works under plain python and under torchrun. The script's own loop says where its steps are
    with `cppmega.guard.steps`; Megatron's `train_step` is found by itself.
    """
    from cppmega import guard

    if not Path(script).is_file():
        raise CppmegaError(
            "no-script",
            f"{script} is not a file.",
            "There is nothing to run.",
            "python -m cppmega.run SCRIPT ARGS",
        )
    # What `python SCRIPT` would have: the script's folder first, not the working directory.
    sys.path[0] = str(Path(script).resolve().parent)
    sys.argv = [script, *arguments]
    guard.start(root)
    runpy.run_path(script, run_name="__main__")
    if not no_steps:
        guard.finish()


def main() -> None:
    """Run, with errors as four lines that name host and rank."""
    try:
        run.main(prog_name="python -m cppmega.run", standalone_mode=False)
    except CppmegaError as error:
        from cppmega import guard

        print(f"[{guard.where()}]\n{error.render()}", file=sys.stderr, flush=True)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(2)


if __name__ == "__main__":
    main()
