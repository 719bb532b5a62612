"""A depthwise causal convolution with SiLU whose taps do not cross document boundaries.

`naive` defines it; the results are the same, computed in fp32 and rounded once.
They are bitwise reproducible, including gradients. The backward needs `4 * s * b * C` bytes.

On a CPU the reference is used, except in Triton's interpreter; on a GPU there is no fallback. The
tiles were chosen without a GPU and are not tuned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cppmega.errors import CppmegaError
from cppmega.ops.common.dispatch import TYPES, kernel_obstacle
from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.common.rows import with_rows
from cppmega.ops.packed_conv import naive as reference

__all__ = ["packed_conv"]


class _Convolution(torch.autograd.Function):
    """`packed_conv(x, weight, bias, position)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, position: Tensor) -> Tensor:
        from cppmega.ops.packed_conv import kernels_triton as kernels

        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kernels.forward(x, weight, bias, position, out)
        ctx.save_for_backward(x, weight, bias, position)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from cppmega.ops.packed_conv import kernels_triton as kernels

        x, weight, bias, position = ctx.saved_tensors
        s, b, c = x.shape
        taps = weight.size(1)
        like: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
        d_sums = torch.empty(s, b, c, **like)
        parts = torch.empty(kernels.tiles(s * b), taps + 1, c, **like)
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kernels.backward(x, weight, bias, position, gradient.contiguous(), d_sums, parts, d_x)
        *d_taps, d_bias = parts.sum(0)
        d_weight = torch.stack(d_taps, dim=1)
        return d_x, d_weight.to(weight.dtype), d_bias.to(bias.dtype), None


def packed_conv(x: Tensor, weight: Tensor, bias: Tensor, bounds: Tensor | None = None) -> Tensor:
    """Compute `naive.packed_conv`.

    Args:
        x: `[s, b, C]`, bf16, fp16 or fp32.
        weight: `[C, taps]`, bf16, fp16 or fp32.
        bias: `[C]`, bf16, fp16 or fp32.
        bounds: as for `cppmega.ops.m2rnn.m2rnn`.

    Returns:
        `[s, b, C]` in the type of x.

    Raises:
        CppmegaError: `no-kernel`.
        ValueError: the shapes do not match.
    """
    if (
        x.ndim != 3
        or weight.ndim != 2
        or not weight.size(1)
        or len(weight) != x.size(2)
        or bias.shape != weight.shape[:1]
    ):
        raise ValueError(
            f"weight {tuple(weight.shape)} and bias {tuple(bias.shape)} for {tuple(x.shape)}"
        )
    if bounds is not None and x.size(1) != 1:
        raise ValueError(f"bounds of documents for {x.size(1)} sequences")
    why = kernel_obstacle(x.device, x.dtype)
    if why is not None and x.device.type == "cpu":
        return reference.packed_conv(x, weight, bias, bounds)
    if why is None and not {weight.dtype, bias.dtype} <= set(TYPES):
        why = f"the weight is {weight.dtype} and the bias {bias.dtype}"
    if why is not None:
        raise CppmegaError(
            "no-kernel",
            f"No kernel of the convolution supports this: {why}.",
            "Plain torch would keep an fp32 copy of the input for every tap.",
            "change the unsupported property, or call cppmega.ops.packed_conv.naive",
        )
    position = reference.positions(len(x), bounds, x.device)
    found: Tensor = _Convolution.apply(
        with_rows(x), weight.contiguous(), bias.contiguous(), position
    )
    return found
