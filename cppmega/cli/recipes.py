"""The command that lists recipes."""

from __future__ import annotations

import click

from cppmega.cli.group import cli, json_option
from cppmega.host.table import put


@cli.command()
@json_option
def recipes(as_json: bool) -> None:
    """List the shipped recipes, their sizes and their purposes.

    GPUs, parameters, memory per GPU, precision, the patches that each needs, and what was measured.
    """
    from cppmega.cli import recipes_list

    text = recipes_list.list_recipes(as_json)
    (click.echo if as_json else put)(text)
