"""Rotary embedding of a part of each head, in one kernel per direction.

`rope_naive` defines it. Megatron's unfused code launches about ten kernels for it forward and
fifteen backward, most of which copy the tensor. Results and gradients are the same to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.device import contiguous_rows
from cppmega.ops.common.dispatch import has_triton
from cppmega.ops.common.once_differentiable import once_differentiable

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def obstacle(t: Tensor, angles: Tensor, adjacent: bool, gathered: bool) -> str | None:
    """Why the kernel does not support a call on a GPU, as a clause; None if it does."""
    if not has_triton():
        return "triton is not installed"
    if t.dtype not in TYPES or angles.dtype != torch.float32:
        return f"a tensor of {t.dtype} is rotated by angles of {angles.dtype}"
    if t.dim() != 4 or angles.shape != (t.size(0), 1, 1, angles.size(-1)):
        return f"a tensor {list(t.shape)} is rotated by angles {list(angles.shape)}"
    if angles.size(-1) % 2 or angles.size(-1) > t.size(-1) or angles.requires_grad:
        return f"{angles.size(-1)} of {t.size(-1)} columns are rotated, or angles are learnt"
    if adjacent and gathered:
        return "columns are gathered and then paired as neighbours"
    return None


def rotated(
    t: Tensor,
    angles: Tensor,
    adjacent: bool = False,
    gathered: bool = False,
    scale: float = 1.0,
    start: int = 0,
) -> Tensor:
    """Compute `rope_naive.rotated` with the kernel.

    Args:
        t: `[s, b, heads, d]`, bf16, fp16 or fp32, with any strides.
        angles: fp32 `[s, 1, 1, r]`; no gradient.
        adjacent: columns 2i and 2i + 1 are a pair, not i and i + r / 2.
        gathered: the even columns of t precede the odd ones before columns are paired.
        scale: factor of cos and sin.
        start: the first column that is rotated.

    Returns:
        `[s, b, heads, d]` in the type of t, contiguous.
    """
    out: Tensor = _Rotated.apply(t, angles, adjacent, gathered, scale, start)
    return out


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        t: Tensor,
        angles: Tensor,
        adjacent: bool,
        gathered: bool,
        scale: float,
        start: int,
    ) -> Tensor:
        from cppmega.ops.pointwise import rope_triton as kernels

        angles = angles.contiguous()  # cos and sin keep the layout
        cos, sin = torch.cos(angles), torch.sin(angles)
        ctx.save_for_backward(cos, sin)
        ctx.how = adjacent, gathered, scale, start
        out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
        kernels.rotate(contiguous_rows(t), cos, sin, out, *ctx.how, False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from cppmega.ops.pointwise import rope_triton as kernels

        cos, sin = ctx.saved_tensors
        out = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        kernels.rotate(contiguous_rows(gradient), cos, sin, out, *ctx.how, True)
        return out, None, None, None, None, None
