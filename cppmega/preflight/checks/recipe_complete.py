"""The installed release has a training loop, and everything that the recipe needs."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable
from cppmega.recipe.index import folder, load
from cppmega.training.requirements import Start

AFTER: tuple[str, ...] = ("one_root",)


def check(context: Context) -> str:
    """Render the recipe, and refuse what is left out.

    Raises:
        CppmegaError: `recipe-not-complete`, `training-not-in-wheel`, `two-recipes`,
            `recipe-invalid`.
        NotApplicable: no recipe is named, or it runs in its own loop.
    """
    recipe = context.recipe
    if recipe is None:
        raise NotApplicable("no recipe is named")
    own = folder() / f"{recipe.name}.py"
    if context.recipe_file is not None and own.is_file() and not own.samefile(context.recipe_file):
        raise CppmegaError(
            "two-recipes",
            f"{context.recipe_file} has the name of the shipped recipe {recipe.name}, whose "
            f"content is {'the same' if load(recipe.name) == recipe else 'different'}.",
            "Their logs, results and run folders could not be distinguished.",
            "rename the file and RECIPE's name",
        )
    line = context.launch_line  # raises for a loop
    start = Start(recipe, line.options, context.session)
    start.check("the tree", "completeness")
    assert line.rendered is not None
    return f"{recipe.name} on megatron-core {line.rendered.version}, nothing left out"
