"""The line uses only what our trainer supports."""

from __future__ import annotations

from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable
from cppmega.training import requirements

AFTER: tuple[str, ...] = ("line_parses",)


def check(context: Context) -> str:
    """Read the parsed line.

    Raises:
        CppmegaError: `not-supported`.
    """
    if context.recipe is None:
        raise NotApplicable("the line is not for this trainer")
    requirements.check_context(context.megatron_args)
    return "a sequence is on one rank"
