"""Mamba-3 over a sequence: cppmega's scan or mamba-ssm's kernels on a GPU, torch on a CPU."""

from __future__ import annotations

import functools
import logging

from torch import Tensor

from cppmega.errors import CppmegaError
from cppmega.ops.mamba3 import naive as reference
from cppmega.ops.mamba3.naive import Definition, Inputs, Parameters

__all__ = ["Definition", "Inputs", "Parameters", "mixed"]

_LOG = logging.getLogger(__name__)


def mixed(
    inputs: Inputs,
    parameters: Parameters,
    definition: Definition = "softplus",
    boundaries: Tensor | None = None,
    chunk: int = 64,
) -> Tensor:
    """Compute `naive.mixed` of `[b, l, h, p]`.

    Args:
        inputs: all of one type; on a GPU of 16 bits, and bf16 for mamba-ssm's kernels.
        parameters: on the same device; on a GPU fp32, except the norms.
        definition: the definition of A.
        boundaries: int32 `[documents + 1]`, cumulative lengths of a pack, whose b is 1 and whose
            last document ends with the sequence; None: every sequence is one document.
        chunk: tokens that are computed together; cppmega's scan ignores it and uses 64 rows.

    Raises:
        CppmegaError: `no-kernel`, only on a GPU, where there is no fallback for a kernel.
    """
    if not inputs.x.numel():
        return reference.without_tokens(inputs, parameters)
    device = inputs.x.device
    if device.type == "cpu":
        bounds = None if boundaries is None else boundaries.tolist()
        return reference.mixed(inputs, parameters, definition, bounds, chunk)
    from cppmega.ops.mamba3 import autograd, scan

    unscanned = scan.obstacle(inputs, parameters)
    siso = inputs.keys.size(3) == 1
    if not unscanned and (not siso or scan.on_hopper(inputs)):
        return autograd.mixed(inputs, parameters, definition, boundaries)
    from cppmega.ops.mamba3 import external as kernels

    why = kernels.obstacle(device, inputs, parameters, chunk)
    if not why:
        # Their SISO takes 0.6 times as long as our kernels for every GPU (`mamba3_h200.md`).
        _log_once("Mamba-3 takes mamba-ssm's kernels.")
        return kernels.mixed(inputs, parameters, definition, boundaries, chunk)
    if not unscanned:
        _log_once(f"Mamba-3 takes cppmega's scan; mamba-ssm's would be faster here, but {why}.")
        return autograd.mixed(inputs, parameters, definition, boundaries)
    raise CppmegaError(
        "no-kernel",
        f"No kernel computes these Mamba-3 mixers. cppmega's scan: {unscanned}. "
        f"mamba-ssm's kernels: {why}.",
        "Plain torch would take many times as long, and keep every product in memory.",
        "sizes that the scan supports, or mamba-ssm 2.3.2.post1 and tilelang",
    )


@functools.cache
def _log_once(message: str) -> None:
    _LOG.info(message)
