"""How many steps the loss of DSA's indexer is dense, as the environment states it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cppmega.errors import CppmegaError
from cppmega.host import env

GATE = "CPPMEGA_LEMYX_DSA"
STEPS = "CPPMEGA_DSA_DENSE_LOSS_STEPS"

_SET = f"export {STEPS}=N with the number of steps, or --set dsa_dense_loss_steps=N"


def is_on(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the first steps are to have the dense loss: a run states their number."""
    return env.is_on(environ.get(GATE, "")) or bool(environ.get(STEPS))


def dense_steps(environ: Mapping[str, str] = os.environ) -> int:
    """The number of steps with the dense loss.

    Raises:
        CppmegaError: `dsa-dense-loss`.
    """
    text = environ.get(STEPS, "").strip()
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise CppmegaError(
        "dsa-dense-loss",
        f"{GATE} is on, and {STEPS}={text!r} is not a number of steps."
        if text
        else f"{GATE} is on, and no number of steps is set.",
        "The indexer's loss is dense up to a stated step; without one it would never change.",
        _SET,
    )


def stated_steps(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number of steps with the dense loss, or None where the environment states none.

    Raises:
        CppmegaError: `dsa-dense-loss`, if the text is not a number of steps.
    """
    return dense_steps(environ) if environ.get(STEPS) else None
