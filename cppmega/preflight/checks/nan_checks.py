"""Megatron's checks for NaN in loss and gradient are on."""

from __future__ import annotations

from cppmega.preflight.context import Context
from cppmega.training import requirements

AFTER: tuple[str, ...] = ("line_parses",)


def check(context: Context) -> str:
    """Read the switch in the parsed line.

    Raises:
        CppmegaError: `nan-checks-off`.
    """
    requirements.check_nan(context.megatron_args)
    return "a NaN in loss or gradient stops the run"
