"""No switch that is known to produce NaN gradients is set."""

from __future__ import annotations

from cppmega.catalogue import decisions
from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import refuse


def check(context: Context) -> str:
    """Compare the environment with the switches that broke runs.

    Raises:
        CppmegaError: `gate-gives-nan`.
    """
    breaking = decisions.breaking_variables()
    refuse(
        CppmegaError(
            "gate-gives-nan",
            f"{name}={context.environ[name]}: {why}. It is not in this release.",
            "Every measurement with it was made on NaN gradients.",
            f"unset {name}; cppmega explain {name}",
        )
        for name, why in breaking.items()
        if context.environ.get(name, "0").lower() not in ("", "0", "false", "off", "no")
    )
    return "none of " + ", ".join(breaking)
