"""The environment sets the gates that the recipe relies on, and contradicts none of its fields."""

from __future__ import annotations

from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable
from cppmega.training.requirements import Start


def check(context: Context) -> str:
    """Compare them with the environment of the launch.

    Raises:
        CppmegaError: `gate-not-set`, `recipe-differs`.
    """
    recipe = context.recipe
    if recipe is None:
        raise NotApplicable("no recipe names a gate")
    Start(recipe, environ=context.environ).check("variables")
    if not (recipe.wanted_gates or recipe.variables):
        raise NotApplicable("the recipe names no gate")
    return ", ".join(f"{name}={value}" for name, value in (*recipe.wanted_gates, *recipe.variables))
