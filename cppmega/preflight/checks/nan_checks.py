"""Megatron's checks for NaN in loss and gradient are on."""

from __future__ import annotations

from types import SimpleNamespace

from cppmega.preflight.context import Context
from cppmega.training import requirements as trainer_checks

AFTER: tuple[str, ...] = ("line_parses",)


def check(context: Context) -> str:
    """Look at what the parser made of the line.

    Raises:
        CppmegaError: `nan-checks-off`.
    """
    trainer_checks.check_nan(SimpleNamespace(**context.megatron_args))
    return "a loss or gradient that is no number stops the run"
