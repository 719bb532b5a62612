"""The commands that check before anything starts: preflight for a launch, doctor for a machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cppmega.cli import completion
from cppmega.cli.group import (
    FINE,
    NOT_AS_IT_MUST_BE,
    UpToDashes,
    after_dashes,
    arguments_options,
    carrying,
    cli,
    tree_options,
)
from cppmega.cli.reports.option import Reports, report_option
from cppmega.host import console
from cppmega.host.table import Row, show, table

if TYPE_CHECKING:
    from cppmega.preflight.context import Context
    from cppmega.preflight.examine import Preflight

_verbose = click.option(
    "-v", "--verbose", is_flag=True, help="Print a line for every check, with its reason."
)


@cli.command(cls=UpToDashes, context_settings={"ignore_unknown_options": True})
@report_option
@tree_options
@click.argument("recipe", required=False, shell_complete=completion.recipes)
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
@arguments_options
@_verbose
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
    unknown_arguments: str,
    arguments_from: Sequence[str],
    verbose: bool,
    nodes: int,
    arguments: Sequence[str],
    reports: Reports,
) -> None:
    """Check everything that can be checked before a launch.

    RECIPE is a shipped name, a path, or the path of a script, whose arguments follow `--`. A recipe
    is followed by the arguments of the launch: the trainer's own options (--data, --save ...) or
    Megatron's arguments; after `--` all are Megatron's. Without a recipe they are a complete
    command line for the installed Megatron's parser: `cppmega preflight -- --num-layers 2 ...`.
    Where a script adds arguments of its own, --arguments-from or --unknown-arguments allow lets
    them pass.
    The exit status is 0 only if every check holds.
    """
    from cppmega.cli import findings as cli_findings

    context = _context(
        *(root, patches, recipe, changes, accept, unknown_arguments, arguments_from, arguments),
        nodes=nodes,
        deep=deep,
    )
    examined = _examined("preflight", context, patches)
    with console.answering():
        if as_json:
            console.print_json({**console.ENVELOPE, **examined.as_json()})
        else:
            cli_findings.print_findings(examined.findings, verbose)
    if examined.ok and not as_json and context.recipe is None and context.arguments:
        console.say("cppmega advise with the same words says which pages serve this line")
    _finish("preflight", examined, reports)


def _context(
    root: Path | None,
    patches: Sequence[Path],
    recipe: str | None,
    changes: Sequence[str],
    accept: Sequence[str],
    unknown_arguments: str,
    arguments_from: Sequence[str],
    arguments: Sequence[str],
    **more: Any,
) -> Context:
    """The launch that a command's words describe."""
    from cppmega.launch import script as launch_script
    from cppmega.preflight.context import Context
    from cppmega.recipe import index as recipes_index
    from cppmega.recipe.run_options import RunOptions
    from cppmega.training import options as trainer_options

    if recipe is not None and recipe.startswith("-"):  # a line without a recipe and without --
        arguments = (recipe, *arguments)
        recipe = None
    own = after_dashes()
    script = launch_script.find(recipe) if recipe is not None else None
    if script is not None:
        recipe = None
        own = own if script.calls_megatrons_parser or arguments_from else ()
    chosen = recipes_index.load(recipe) if recipe is not None else None
    if chosen is not None:
        if arguments_from or unknown_arguments == "allow":
            raise click.UsageError(
                "--arguments-from and --unknown-arguments are for a script's command line; a "
                "recipe's trainer adds no arguments"
            )
        chosen = recipes_index.with_text(chosen, changes)
        options, further = trainer_options.read(arguments)
        options = replace(options, accept=(*accept, *options.accept))
    elif changes:
        raise click.UsageError("--set changes a recipe, and none is named")
    else:
        options, further = RunOptions(accept=tuple(accept)), tuple(arguments)
    return Context(
        root=root,
        catalogues=patches or None,
        recipe=chosen,
        recipe_file=recipes_index.file_of(recipe) if recipe is not None else None,
        options=options,
        arguments=(*further, *own),
        allows_unknown=unknown_arguments == "allow",
        arguments_from=tuple(arguments_from),
        **more,
    )


@cli.command(cls=UpToDashes, context_settings={"ignore_unknown_options": True})
@tree_options
@click.argument("recipe", required=False, shell_complete=completion.recipes)
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change the recipe.")
@arguments_options
@click.option("-v", "--verbose", is_flag=True, help="Name the irrelevant pages, with the reason.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def advise(
    root: Path | None,
    patches: Sequence[Path],
    as_json: bool,
    recipe: str | None,
    changes: Sequence[str],
    unknown_arguments: str,
    arguments_from: Sequence[str],
    verbose: bool,
    arguments: Sequence[str],
) -> None:
    """Say which pages serve a command line, and what would turn on more.

    \b
    cppmega advise -- --num-layers 32 --hidden-size 4096 ...

    RECIPE is a shipped name, a path, or the path of a script. The words after `--` are those that
    the script gives to Megatron's parser. Nothing need be applied yet, no GPU is needed, and
    nothing is written.

    A page that `serves` is executed by such a run once it is applied. One that is `possible` would
    be with the arguments or the command in its row, which also has the memory that they save, by
    the estimate. Of pages that `perhaps` serve, no argument tells. `cppmega explain PAGE` has the
    reasons and the measurements.
    """
    from cppmega.cli import advice as cli_advice

    context = _context(
        *(root, patches, recipe, changes, (), unknown_arguments, arguments_from, arguments),
        only_parses=True,
    )
    advice = cli_advice.asked(context)
    with console.answering():
        if as_json:
            console.print_json({**console.ENVELOPE, **cli_advice.as_json(context, advice)})
        else:
            cli_advice.print_advice(context, advice, verbose)


@cli.command()
@report_option
@tree_options
@_verbose
@click.option(
    "--deep",
    is_flag=True,
    help="Also compare every kernel with its reference on this GPU (minutes).",
)
def doctor(
    root: Path | None,
    patches: Sequence[Path],
    as_json: bool,
    verbose: bool,
    deep: bool,
    reports: Reports,
) -> None:
    """Check this machine, without a recipe.

    Shows the machine, its GPUs and the installed packages, and runs the checks of the preflight
    that need no recipe: the patches and their files, the environment, the packages, the GPUs, the
    disk of the run folders, and what a training process would import. It writes nothing. The exit
    status is 0 only if every check holds; a missing GPU is not a failure.
    """
    import msgspec

    from cppmega.cli import findings as cli_findings
    from cppmega.preflight import machine
    from cppmega.preflight.context import Context
    from cppmega.runs import folder as run_folder
    from cppmega.tree.installed import Tree

    runs = run_folder.root()
    here = machine.inspect(runs)
    context = Context(root=root, catalogues=patches or None, folder=runs, deep=deep)
    if root is not None:  # in place of the installed one
        packages = {**here.packages, "megatron-core": f"{Tree(root).version} in {root}"}
        here = msgspec.structs.replace(here, packages=packages)
    if not as_json:
        show(table(map(Row, machine.described(here)), widths=(cli_findings.STATE_WIDTH,)))
    examined = _examined("doctor", context, patches)
    with console.answering():
        if as_json:
            facts = {"machine": msgspec.to_builtins(here)}
            console.print_json({**console.ENVELOPE, **examined.as_json(), **facts})
        else:
            other = ("needs a recipe or a GPU", "need a recipe or a GPU")
            cli_findings.print_findings(examined.findings, verbose, other)
    _finish("doctor", examined, reports)


def _examined(command: str, context: Context, patches: Sequence[Path]) -> Preflight:
    """Run every check; the next commands in the findings name the user's catalogues."""
    from cppmega.preflight import examine as checks
    from cppmega.preflight.checks import ORDER

    with console.Progress(command, len(ORDER)) as progress:
        examined = checks.examine(context, progress)
    with_catalogues = (replace(one, next=carrying(one.next, patches)) for one in examined.findings)
    return replace(examined, findings=tuple(with_catalogues))


def _finish(command: str, examined: Preflight, reports: Reports) -> NoReturn:
    from cppmega.cli.reports import answers

    reports.write(lambda: answers.of_findings(command, examined.findings))
    sys.exit(FINE if examined.ok else NOT_AS_IT_MUST_BE)
