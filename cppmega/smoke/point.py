"""One step of a smoke run, as its curve has it."""

from __future__ import annotations

import msgspec


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One training step, over all ranks."""

    step: int
    loss: float
    mtp: float | None
    """Mean over the MTP depths, on the labels that Megatron computed; None: there is no MTP."""
    grad_norm: float
    wrong: int
    """MTP labels that are wrong or missing, judged by the documents."""
    labels: int
    """True MTP labels in the documents."""
