"""The command-line options of a run, for the trainer and for the launcher that starts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cppmega.errors import CppmegaError

if TYPE_CHECKING:
    from cppmega.recipe.run_options import RunOptions

F = TypeVar("F", bound=Callable[..., Any])

_FOLDER = click.Path(path_type=Path)
_STEPS = click.IntRange(1)

_OPTIONS = (
    click.option(
        "--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change the recipe."
    ),
    click.option("--data", multiple=True, metavar="PREFIX", help="A prepared dataset; repeatable."),
    click.option(
        "--tokenizer", help="Tokenizer of the data, if its card does not name one, or to check it."
    ),
    click.option("--eod", help="End token of that tokenizer, if its files do not name it."),
    click.option(
        "--data-cache", type=_FOLDER, help="Folder for sample indices (default: next to the data)."
    ),
    click.option(
        "--held-out",
        multiple=True,
        metavar="PREFIX",
        help="A prepared dataset to evaluate on, for recipes with eval_interval; repeatable.",
    ),
    click.option(
        "--mock-data", is_flag=True, help="Train on made-up tokens; every log line says so."
    ),
    click.option(
        "--save", type=_FOLDER, help="Folder for checkpoints; a restarted run resumes from them."
    ),
    click.option("--load", type=_FOLDER, help="Resume from the checkpoint of another run."),
    click.option(
        "--save-interval",
        type=_STEPS,
        default=500,
        show_default=True,
        help="Steps between checkpoints.",
    ),
    click.option("--exit-interval", type=_STEPS, help="End after a multiple of this many steps."),
    click.option(
        "--log-interval", type=_STEPS, default=1, show_default=True, help="Steps between log lines."
    ),
    click.option("--tensorboard", type=_FOLDER, help="Folder for TensorBoard."),
    click.option("--wandb-project", default="", help="Log to this Weights & Biases project."),
    click.option("--wandb-name", default="", help="Name of the run there (default: the recipe's)."),
    click.option("--metrics", type=_FOLDER, help="File for one JSON object per logged step."),
    click.option(
        "--profile",
        type=_STEPS,
        metavar="STEPS",
        help="Profile this many steps on rank 0; their throughput is not a benchmark.",
    ),
    click.option(
        "--profile-after",
        type=_STEPS,
        default=10,
        show_default=True,
        help="Warm-up steps before the profiled ones.",
    ),
    click.option(
        "--profile-folder",
        type=_FOLDER,
        help="Folder for the profile (default: profile/ in the run folder, or here).",
    ),
    click.option(
        "--accept",
        multiple=True,
        metavar="FILE=SHA256",
        help="Train this edited file of Megatron; repeatable.",
    ),
    click.option(
        "--allow-fallback",
        multiple=True,
        metavar="PAGE",
        help="Let Megatron's own code compute what this patch declines; repeatable.",
    ),
    click.option(
        "--megatron", "root", type=_FOLDER, metavar="ROOT", help="Import megatron from this folder."
    ),
)


def options(command: F) -> F:
    """Give a command the options of a run, whose values are the fields of `RunOptions`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read(words: Sequence[str]) -> tuple[RunOptions, tuple[str, ...]]:
    """Parse the trainer's options among the words of a command line.

    Returns:
        The options, and the remaining words.

    Raises:
        CppmegaError: `wrong-usage`.
    """
    from cppmega.recipe.run_options import RunOptions

    try:
        values: dict[str, Any] = _words.main(list(words), standalone_mode=False)
    except click.ClickException as error:
        raise CppmegaError(
            "wrong-usage",
            f"The trainer does not accept the words after the recipe: {error.format_message()}",
            "It would end before it reads the recipe.",
            "python -m cppmega.trainer --help; Megatron's own arguments of these names go after --",
        ) from None
    arguments: tuple[str, ...] = values.pop("arguments")
    return RunOptions(**values), arguments


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@options
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def _words(**values: Any) -> dict[str, Any]:
    return values
