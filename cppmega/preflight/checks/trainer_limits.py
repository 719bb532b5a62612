"""The line asks our trainer for nothing that it does not do."""

from __future__ import annotations

from types import SimpleNamespace

from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable
from cppmega.training import requirements as trainer_checks

AFTER: tuple[str, ...] = ("line_parses",)


def check(context: Context) -> str:
    """Look at what the parser made of the line.

    Raises:
        CppmegaError: `not-supported`.
    """
    if context.recipe is None:
        raise NotApplicable("the line is not for our trainer")
    trainer_checks.check_context(SimpleNamespace(**context.megatron_args))
    return "a sequence is on one rank"
