"""A launch line as the checks see it: the trainer's options, and the arguments for Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cppmega.host import command_words
from cppmega.preflight.findings import NotApplicable
from cppmega.recipe import Recipe
from cppmega.recipe.render import Rendered, render
from cppmega.recipe.run_options import RunOptions
from cppmega.training.requirements import Start


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """The command line that is launched."""

    argv: tuple[str, ...]
    """Arguments for Megatron's parser."""
    options: RunOptions
    """With `load` set to `save` where the run resumes from its own checkpoint. Without a recipe:
    Megatron's own --save and --load."""
    world: int | None
    """Number of ranks; None: the fewest that the line's parallel sizes allow."""
    rendered: Rendered | None
    """None: the line does not come from a recipe."""
    further: tuple[str, ...] = ()
    """Arguments in argv that come neither from the recipe's fields nor from the trainer's
    options."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the trainer sets where the user has not."""
        return dict(self.rendered.environment) if self.rendered is not None else {}

    @property
    def flags(self) -> frozenset[str]:
        """The names of the arguments in the line."""
        return frozenset(option.name for option in command_words.read(self.argv))

    @classmethod
    def from_words(
        cls,
        words: tuple[str, ...],
        options: RunOptions,
        environ: Mapping[str, str],
        world: int | None = None,
    ) -> LaunchLine:
        """The line that a user wrote for Megatron's parser.

        Raises:
            NotApplicable: there are no arguments.
        """
        if not words:
            raise NotApplicable("neither a recipe nor a launch line is named")
        if world is None and environ.get("WORLD_SIZE", "").isdigit():
            world = int(environ["WORLD_SIZE"])
        given = {option.name: " ".join(option.values) for option in command_words.read(words)}
        save, load = (
            Path(given[name]) if given.get(name) else None for name in ("--save", "--load")
        )
        options = replace(options, save=save, load=load)
        return cls(words, options, world, None)

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, options: RunOptions, arguments: tuple[str, ...], version: str
    ) -> LaunchLine:
        """The line that the trainer renders from a recipe.

        Args:
            recipe: the run.
            options: the trainer's options for this start.
            arguments: Megatron's own, added to the recipe's.
            version: of the installed megatron-core.

        Raises:
            NotApplicable: nothing that Megatron parses is launched.
            CppmegaError: the recipe cannot be rendered for that version.
        """
        options = options.resuming()
        if recipe.kind == "loop":
            Start(recipe.plus(*arguments), options).check("loops")
            raise NotApplicable(f"{recipe.name} runs in its own loop: Megatron parses nothing")
        # Each of these has a check of its own, even if the recipe would refuse it.
        rendered = render(recipe, version, options, further=arguments)
        further = (*recipe.arguments, *arguments)
        return cls(rendered.argv, options, recipe.gpus, rendered, further)
