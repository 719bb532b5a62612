"""Train a recipe with the installed Megatron: `python -m cppmega.run -m cppmega.trainer RECIPE`.

Works from the wheel alone from megatron-core 0.17 on. Whatever files can show is checked first,
before torch is imported and before any GPU memory is taken.
"""

from __future__ import annotations

import shlex
from typing import Any

import click

from cppmega import calls, guard
from cppmega.checkpoints import files as checkpoint_files
from cppmega.guard import error_file
from cppmega.recipe import index as recipes_index
from cppmega.recipe.run_options import RunOptions
from cppmega.training import options as trainer_options
from cppmega.training import own_loop
from cppmega.training import plan as planning
from cppmega.training.requirements import Start
from cppmega.tree import accepted


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe")
@trainer_options.options
@click.option("--dry-run", is_flag=True, help="Check everything files can show, print the line.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def train(
    recipe: str,
    arguments: tuple[str, ...],
    dry_run: bool,
    **values: Any,
) -> None:
    """Train RECIPE, a shipped name or a path. See `cppmega recipes`.

    ARGUMENTS after `--` are Megatron's own, and are added to the recipe's.
    """
    options = RunOptions(**values).resuming()
    changed = recipes_index.with_text(recipes_index.load(recipe), options.changes).plus(*arguments)
    accepted.accept(accepted.merged(changed.accepted_edits, options.accept))
    calls.allow((*changed.allow_fallback, *options.allow_fallback))
    session = planning.open_session(options.root)
    calls.check_allowed(session.pages)
    Start(changed, options).check("the profiler")
    if changed.kind == "loop" and not dry_run:
        if options.load is not None:
            checkpoint_files.newest(options.load)
        own_loop.train(changed, options)
        return
    plan = planning.check_files(changed, options, session)
    if dry_run:
        click.echo(shlex.join(plan.rendered.argv))
        guard.no_step_because("--dry-run was given")
    plan = planning.check_machine(plan)
    if not dry_run:
        from cppmega.training.pretrain import pretrain

        pretrain(plan)


def main() -> None:
    """Run the command; errors name the host and the rank."""
    with error_file.reported():
        train.main(prog_name="python -m cppmega.run -m cppmega.trainer", standalone_mode=False)


if __name__ == "__main__":
    main()
