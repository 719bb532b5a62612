"""The options of a training run: one list for the trainer and for the launcher that starts it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_FOLDER = click.Path(path_type=Path)
_STEPS = click.IntRange(1)

_OPTIONS = (
    click.option(
        "--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change the recipe."
    ),
    click.option("--data", multiple=True, metavar="PREFIX", help="A prepared dataset; repeatable."),
    click.option(
        "--tokenizer", help="What made the data, where its card does not say or to check it."
    ),
    click.option("--eod", help="End token of that tokenizer, where its files do not say it."),
    click.option("--data-cache", type=_FOLDER, help="Folder for sample indices [beside the data]."),
    click.option("--mock-data", is_flag=True, help="Train on made-up tokens; every line says so."),
    click.option(
        "--save", type=_FOLDER, help="Checkpoints; a run started again goes on from them."
    ),
    click.option("--load", type=_FOLDER, help="Go on from the checkpoint of another run."),
    click.option("--save-interval", type=_STEPS, default=500, show_default=True, help="Steps."),
    click.option("--exit-interval", type=_STEPS, help="End after a multiple of this many steps."),
    click.option("--log-interval", type=_STEPS, default=1, show_default=True, help="Steps."),
    click.option("--tensorboard", type=_FOLDER, help="Folder for TensorBoard."),
    click.option("--wandb-project", default="", help="Log to this Weights & Biases project."),
    click.option("--wandb-name", default="", help="Name of the run there [the recipe's]."),
    click.option("--metrics", type=_FOLDER, help="File for one JSON object per logged step."),
    click.option(
        "--accept",
        multiple=True,
        metavar="FILE=SHA256",
        help="Train this edited file of Megatron; repeatable.",
    ),
    click.option(
        "--megatron", "root", type=_FOLDER, metavar="ROOT", help="Import megatron from here."
    ),
)
_FLAGS = {"mock_data"}
_SPELLED = {"changes": "--set", "root": "--megatron"}
_PATHS = ("data_cache", "save", "load", "tensorboard", "metrics", "root")
_NOT_OF_THE_RUN = ("changes", "root", "tokenizer", "eod", "metrics", "accept")


def options(command: F) -> F:
    """Give a command the options of a run."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def absolute(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options with every path absolute, for a process in another working directory."""
    paths = {n: Path(values[n]).absolute() for n in _PATHS if values[n] is not None}
    return {**values, **paths, "data": tuple(str(Path(one).absolute()) for one in values["data"])}


def divided(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of `trainer.run_of`, and those that say something else than the run."""
    run = {name: value for name, value in values.items() if name not in _NOT_OF_THE_RUN}
    return run, {name: values[name] for name in _NOT_OF_THE_RUN if name in values}


def words(values: Mapping[str, Any], without: Iterable[str] = ()) -> list[str]:
    """The options as the words of a command line.

    Args:
        values: what click read, by parameter.
        without: parameters to leave out.
    """
    found: list[str] = []
    for name, value in values.items():
        if name in without or value is None or value in ((), "", False):
            continue
        flag = _SPELLED.get(name, "--" + name.replace("_", "-"))
        if name in _FLAGS:
            found.append(flag)
            continue
        for one in value if isinstance(value, tuple) else (value,):
            found += [flag, str(one)]
    return found
