"""The command that checks a launch before it starts: preflight."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from cppmega.cli.group import FINE, NOT_AS_IT_MUST_BE, carrying, cli, tree_options
from cppmega.cli.reports.option import Reports, report_option


@cli.command(context_settings={"ignore_unknown_options": True})
@report_option
@tree_options
@click.argument("recipe", required=False)
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change the recipe.")
@click.option(
    "--accept",
    multiple=True,
    metavar="FILE=SHA256",
    help="Accept this edited file of Megatron; repeatable.",
)
@click.option(
    "--deep",
    is_flag=True,
    help="Also compare every kernel with its reference on this GPU (minutes).",
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Print a line for every check, with its reason."
)
@click.option("--nnodes", "nodes", type=int, default=1, show_default=True, help="Number of hosts.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def preflight(
    root: Path | None,
    patches: Sequence[Path],
    as_json: bool,
    recipe: str | None,
    changes: Sequence[str],
    accept: Sequence[str],
    deep: bool,
    verbose: bool,
    nodes: int,
    arguments: Sequence[str],
    reports: Reports,
) -> None:
    """Check everything that can be checked before a launch.

    RECIPE is a shipped name or a path. It is followed by the arguments of the launch: the trainer's
    own options (--data, --save ...) or Megatron's arguments. Without a recipe they are a complete
    command line for the installed Megatron's parser: `cppmega preflight -- --num-layers 2 ...`.
    The exit status is 0 only if every check holds.
    """
    from cppmega.cli import findings as cli_findings
    from cppmega.cli.reports import answers
    from cppmega.host import console
    from cppmega.preflight import examine as checks
    from cppmega.preflight.context import Context
    from cppmega.recipe import index as recipes_index
    from cppmega.training import options as trainer_options

    if recipe is not None and recipe.startswith("-"):  # there was no recipe before the --
        arguments = (recipe, *arguments)
        recipe = None
    options, further = trainer_options.read(arguments)
    options = replace(options, accept=(*accept, *options.accept))
    chosen = recipes_index.load(recipe) if recipe is not None else None
    if chosen is not None:
        chosen = recipes_index.with_text(chosen, changes)
    elif changes:
        raise click.UsageError("--set changes a recipe, and none is named")
    context = Context(
        root=root,
        catalogues=patches or None,
        recipe=chosen,
        recipe_file=recipes_index.file_of(recipe) if recipe is not None else None,
        options=options,
        # Without a recipe all words are Megatron's, including those that the trainer has as well.
        arguments=tuple(arguments) if chosen is None else further,
        nodes=nodes,
        deep=deep,
    )
    with console.Progress("preflight") as progress:
        found = checks.examine(context, progress)
    with_catalogues = (replace(one, next=carrying(one.next, patches)) for one in found.findings)
    found = replace(found, findings=tuple(with_catalogues))
    with console.answering():
        if as_json:
            console.print_json({**console.ENVELOPE, **found.as_json()})
        else:
            cli_findings.print_findings(found.findings, verbose)
    reports.write(lambda: answers.of_findings("preflight", found.findings))
    sys.exit(FINE if found.ok else NOT_AS_IT_MUST_BE)
