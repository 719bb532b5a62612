"""The command on recipes."""

from __future__ import annotations

import click

from cppmega.cli.group import cli


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def recipes(as_json: bool) -> None:
    """The shipped recipes: GPUs, parameters, memory, precision, and what each is for."""
    from cppmega.cli import recipes_list

    click.echo(recipes_list.list_recipes(as_json))
