"""No switch that gives NaN gradients is on, and every gate that the recipe relies on is set.

No variable contradicts one of the recipe's fields, either.
"""

from __future__ import annotations

from cppmega.catalogue import decisions
from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Problems
from cppmega.training.requirements import Start


def check(context: Context) -> Problems:
    """Compare the environment of the launch with the switches that broke runs, and with the recipe.

    Yields:
        `gate-gives-nan`.

    Raises:
        CppmegaError: `gate-not-set`, `recipe-differs`.
    """
    breaking = decisions.breaking_variables()
    for name, why in breaking.items():
        if context.environ.get(name, "0").lower() not in ("", "0", "false", "off", "no"):
            yield CppmegaError(
                "gate-gives-nan",
                f"{name}={context.environ[name]}: {why}. It is not in this release.",
                "Every measurement with it was made on NaN gradients.",
                f"unset {name}; cppmega explain {name}",
            )
    held = [f"none of {', '.join(breaking)}"]
    if context.recipe is not None:
        Start(context.recipe, environ=context.environ).check("variables")
        named = (*context.recipe.wanted_gates, *context.recipe.variables)
        held += [f"{name}={value}" for name, value in named]
    return "; ".join(held)
