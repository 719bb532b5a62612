"""The environment sets the gates that the recipe relies on."""

from __future__ import annotations

from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable
from cppmega.training import requirements

AFTER: tuple[str, ...] = ()


def check(context: Context) -> str:
    """Compare them with the environment of the launch.

    Raises:
        CppmegaError: `gate-not-set`.
    """
    if context.recipe is None or not context.recipe.gates:
        raise NotApplicable("no recipe names a gate")
    requirements.check_gates(context.recipe, context.environ)
    return ", ".join(f"{name}={value}" for name, value in context.recipe.gates)
