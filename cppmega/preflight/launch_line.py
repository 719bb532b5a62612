"""A launch line as the checks see it: the trainer's options, and the arguments for Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cppmega.preflight.findings import NotApplicable
from cppmega.recipe import Recipe
from cppmega.recipe.fields import FORBIDDEN_ARGUMENTS
from cppmega.recipe.render import Rendered, render
from cppmega.recipe.run_options import RunOptions


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

    def has(self, *flags: str) -> bool:
        """Whether one of the arguments is in the line."""
        return any(word.partition("=")[0] in flags for word in self.argv)

    @classmethod
    def from_words(
        cls, words: tuple[str, ...], options: RunOptions, environ: Mapping[str, str]
    ) -> LaunchLine:
        """The line that a user wrote for Megatron's parser.

        Raises:
            NotApplicable: there are no arguments.
        """
        if not words:
            raise NotApplicable("neither a recipe nor a launch line is named")
        world = int(environ["WORLD_SIZE"]) if environ.get("WORLD_SIZE", "").isdigit() else None
        places = {flag: _last(words, flag) for flag in ("--save", "--load")}
        options = replace(options, save=places["--save"], load=places["--load"])
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
            from cppmega.smoke import loop as smoke_loop

            smoke_loop.refuse_options(recipe.plus(*arguments), options)
            smoke_loop.folder_of(options.data, recipe)
            raise NotApplicable(f"{recipe.name} runs in its own loop: Megatron parses nothing")
        # A recipe refuses these arguments; here they stay in the line, so that each has its own
        # check.
        refused = [word for word in arguments if word.partition("=")[0] in FORBIDDEN_ARGUMENTS]
        kept = recipe.plus(*(word for word in arguments if word not in refused))
        rendered = render(kept, version, options)
        argv = (*rendered.argv, *refused)
        return cls(argv, options, recipe.gpus, rendered, (*recipe.arguments, *arguments))


def _last(words: tuple[str, ...], flag: str) -> Path | None:
    """The folder that an argument names, as Megatron's parser reads it: the last one counts."""
    found = None
    for word, following in zip(words, (*words[1:], ""), strict=True):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if name == flag and value:
            found = Path(value)
    return found
