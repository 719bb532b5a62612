"""A launch line as the preflight sees it: the trainer's options, and the words for Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cppmega.arguments import Rendered, Run, render
from cppmega.check import NotApplicable
from cppmega.errors import CppmegaError
from cppmega.recipe import Recipe
from cppmega.recipe_fields import FORBIDDEN_ARGUMENTS
from cppmega.trainer import run_of
from cppmega.trainer_options import divided, options


@dataclass(frozen=True, slots=True)
class Line:
    """What is launched."""

    argv: tuple[str, ...]
    """For Megatron's parser."""
    run: Run
    """Data, checkpoints and logs; all defaults where a whole line was given."""
    world: int | None
    """Processes; None: the line's own parallel sizes say the least there can be."""
    rendered: Rendered | None
    """None: the line was not made from a recipe."""
    tokenizer: str | None = None
    eod: str | None = None
    metrics: Path | None = None
    further: tuple[str, ...] = ()
    """Those of argv that neither the recipe's fields nor the trainer's options made."""

    @property
    def environment(self) -> dict[str, str]:
        """What the trainer sets where the user has not."""
        return dict(self.rendered.environment) if self.rendered is not None else {}

    def has(self, *flags: str) -> bool:
        """Whether one of the arguments stands on the line."""
        return any(word.partition("=")[0] in flags for word in self.argv)


def of(
    recipe: Recipe | None,
    words: tuple[str, ...],
    given: Mapping[str, Any],
    version: str,
    environ: Mapping[str, str],
) -> Line:
    """Take the words behind a recipe apart as the trainer does, or a whole line as it is.

    Args:
        given: what `read` made of the words.

    Raises:
        NotApplicable: nothing that Megatron parses is launched.
        CppmegaError: the recipe cannot be rendered for that version.
    """
    if recipe is None:
        if not words:
            raise NotApplicable("no recipe and no launch line was given")
        world = int(environ["WORLD_SIZE"]) if environ.get("WORLD_SIZE", "").isdigit() else None
        # Megatron and our trainer call these two the same.
        return Line(words, Run(save=given["save"], load=given["load"]), world, None)
    further = given["arguments"]
    of_the_run, others = divided({n: value for n, value in given.items() if n != "arguments"})
    tokenizer, eod, metrics = (others[name] for name in ("tokenizer", "eod", "metrics"))
    run = run_of(**of_the_run)
    if recipe.kind == "loop":
        from cppmega import smoke_loop

        smoke_loop.refuse_options(recipe.plus(*further), run, tokenizer=tokenizer, eod=eod)
        smoke_loop.folder_of(run.data, recipe)
        raise NotApplicable(f"{recipe.name} runs in a loop of its own: Megatron parses nothing")
    # A recipe refuses these words; here they stay on the line, and the check of each names it.
    refused = [word for word in further if word.partition("=")[0] in FORBIDDEN_ARGUMENTS]
    rendered = render(recipe.plus(*(w for w in further if w not in refused)), version, run)
    argv = (*rendered.argv, *refused)
    words = (*recipe.arguments, *further)
    return Line(argv, run, recipe.gpus, rendered, tokenizer, eod, metrics, words)


def read(words: tuple[str, ...]) -> dict[str, Any]:
    """The trainer's options, and under `arguments` the words that are none of them.

    Raises:
        CppmegaError: `wrong-usage`.
    """
    try:
        found: dict[str, Any] = _words.main(list(words), standalone_mode=False)
        return found
    except click.ClickException as error:
        raise CppmegaError(
            "wrong-usage",
            f"The trainer does not take the words behind the recipe: {error.format_message()}",
            "It would end before it has read the recipe.",
            "python -m cppmega.trainer --help",
        ) from None


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@options
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def _words(**values: Any) -> dict[str, Any]:
    return values
