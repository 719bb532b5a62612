"""No argument after `--` repeats what the recipe or the trainer's own options set.

Megatron uses the last one: a run would save where no one looks for its checkpoints, and train with
a batch that differs from its record, its memory estimate and its data.
"""

from __future__ import annotations

from dataclasses import fields

from cppmega.errors import CppmegaError
from cppmega.host import command_words
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, Problems
from cppmega.recipe import Recipe

AFTER: tuple[str, ...] = ("recipe_complete",)

_SAME = (
    *("--save", "--load", "--save-interval", "--exit-interval", "--log-interval"),
    "--wandb-project",
)
_OPTIONS = {flag: flag for flag in _SAME} | {
    "--data-path": "--data",
    "--data-cache-path": "--data-cache",
    "--tensorboard-dir": "--tensorboard",
    "--wandb-exp-name": "--wandb-name",
}
"""Megatron's spelling -> the trainer's."""
_FIELDS = {
    "--" + field.name.replace("_", "-"): field.name
    for field in fields(Recipe)
    if field.name not in ("name", "stack", "patches", "gates", "environment", "arguments")
} | {"--hybrid-layer-pattern": "pattern"}


def check(context: Context) -> Problems:
    """Compare the words after `--`, and those that the recipe adds with `plus`.

    Yields:
        `argument-not-megatrons`.

    Raises:
        NotApplicable: without a recipe, the whole line is Megatron's.
    """
    line = context.launch_line
    if context.recipe is None:
        raise NotApplicable("no recipe is named: the whole line is Megatron's")
    for option in command_words.read(line.further):
        value = " ".join(option.values)
        if option.name in _OPTIONS:
            instead = f"{_OPTIONS[option.name]} {value}".strip() + " before the --"
        elif option.name in _FIELDS:
            instead = f"--set {_FIELDS[option.name]}={value or 'True'}"
        else:
            continue
        yield CppmegaError(
            "argument-not-megatrons",
            f"{option.words[0]} is among Megatron's own arguments, and sets what "
            f"{'the trainer' if option.name in _OPTIONS else 'the recipe'} sets.",
            "Megatron uses the last one, and the record of the run has the other.",
            instead,
        )
    return f"{len(line.further)} further words"
