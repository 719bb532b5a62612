"""Refuse recipes that cannot be trained anywhere; runs whenever a recipe is created."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from cppmega.host import command_words
from cppmega.recipe.arguments import arguments
from cppmega.recipe.fields import Fields
from cppmega.recipe.run_options import RunOptions
from cppmega.rules import RULES, recipes, rule
from cppmega.rules.rule import Run
from cppmega.sizes import megatron_args
from cppmega.tree import accepted

_NEWEST = (9999, 0)
"""A release line with every argument."""
_LISTS = ("recompute_modules", "offload_modules", "cuda_graph_modules", "cuda_graph_scope")


def check(recipe: Fields) -> None:
    """Refuse a recipe that contradicts itself.

    Raises:
        CppmegaError: the first rule that is broken; `recipe-invalid` if the rule has no name.
            `bad-accept`, `bad-pattern`.
    """
    accepted.from_pairs(recipe.accepted_edits)
    about = "recipe-invalid", f"Recipe {recipe.name}: "
    rule.check(recipes.RULES, recipe, *about)
    rule.check(RULES, as_run(recipe), *about)


def as_run(recipe: Fields) -> Run:
    """The run that a recipe describes: its arguments as Megatron would read them.

    No release is asked: an argument that only one of them has counts, too.
    """
    virtual = recipe.virtual_pipeline_model_parallel_size
    options: dict[str, Any] = {"virtual_pipeline_model_parallel_size": virtual}
    for name, values in arguments(recipe, _NEWEST, RunOptions(), None):
        _read(options, name, values)
    options = with_words(options, recipe.arguments)
    dense, moe = recipe.first_dense_layers, recipe.num_layers - recipe.first_dense_layers
    options |= {"mtp_num_layers": recipe.layout.depths, "moe_layer_freq": [0] * dense + [1] * moe}
    variables = {**dict(recipe.environment), **dict(recipe.wanted_gates), **dict(recipe.variables)}
    return Run(Namespace(**options), variables, recipe=recipe)


def with_words(options: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Options with those that a command line adds, whatever the release's parser knows."""
    added = dict(options)
    for option in command_words.read(words):
        _read(added, option.name, option.values)
    return added


def _read(options: dict[str, Any], name: str, values: tuple[str, ...]) -> None:
    name = megatron_args.destination(name)
    read = [_value(value) for value in values]
    options[name] = read if name in _LISTS else read[0] if read else True


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
