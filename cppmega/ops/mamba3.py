"""Mamba-3 over a sequence: mamba-ssm's kernels on a GPU, plain torch on a CPU."""

from __future__ import annotations

from torch import Tensor

from cppmega.errors import CppmegaError
from cppmega.ops import mamba3_reference as reference
from cppmega.ops.mamba3_reference import Definition, Inputs, Parameters

__all__ = ["Definition", "Inputs", "Parameters", "mixed"]


def mixed(
    inputs: Inputs,
    parameters: Parameters,
    definition: Definition,
    boundaries: Tensor | None,
    chunk: int,
) -> Tensor:
    """Compute `mamba3_reference.mixed` of `[b, l, h, p]`.

    Args:
        inputs: all of one type; on a GPU bf16.
        parameters: on the same device; on a GPU fp32, except the norms.
        definition: the definition of A.
        boundaries: int32 `[documents + 1]`, cumulative lengths of a pack, whose b is 1 and whose
            last document ends with the sequence; None: every sequence is one document.
        chunk: tokens that are computed together.

    Raises:
        CppmegaError: `mixer-no-kernel`, only on a GPU, where there is no fallback for a kernel.
    """
    device = inputs.x.device
    if device.type == "cpu":
        bounds = None if boundaries is None else boundaries.tolist()
        return reference.mixed(inputs, parameters, definition, bounds, chunk)
    from cppmega.ops import mamba3_kernels as kernels

    if why := kernels.obstacle(device, inputs, parameters, chunk):
        raise CppmegaError(
            "mixer-no-kernel",
            f"No kernel computes these Mamba-3 mixers: {why}.",
            "Plain torch would take many times as long, and keep every product in memory.",
            "install mamba-ssm 2.3.2.post1 and tilelang, or change the unsupported property",
        )
    return kernels.mixed(inputs, parameters, definition, boundaries, chunk)
