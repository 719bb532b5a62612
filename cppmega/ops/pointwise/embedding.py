"""The lookup of an embedding whose gradient is added to Megatron's sum, row by row.

The gradient of the whole table, almost all of which is zero, is neither written nor read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.dispatch import TYPES, has_triton
from cppmega.ops.common.main_grad import MainGrad
from cppmega.ops.common.once_differentiable import once_differentiable


def obstacle(main_grad: MainGrad) -> str | None:
    """Why the kernel does not add to this sum, as a clause; None if it does."""
    weight, buffer = main_grad.weight, main_grad.buffer
    if not has_triton():
        return "triton is not installed"
    if weight.dtype not in TYPES or buffer.dtype not in TYPES:
        return f"gradients of {weight.dtype} are added to {buffer.dtype}"
    if buffer.shape != weight.shape or not buffer.is_contiguous():
        return "main_grad is not stored as the weight is"
    return None


def lookup(main_grad: MainGrad, ids: Tensor, masked: Tensor | None = None) -> Tensor:
    """The rows of a weight, whose gradients are added to its `main_grad`.

    They are summed in fp32 in a fixed order, and rounded once to the type of `main_grad`.

    Args:
        main_grad: of a weight `[V, D]` in bf16, fp16 or fp32; `obstacle` gives None for it.
        ids: integers of any shape, from 0 to V - 1, and V is below 2^31 - 1.
        masked: bool, of the shape of `ids`: where no gradient is added; None: nowhere.

    Returns:
        `[*ids, D]`, of the weight's type, also where `masked`.
    """
    out: Tensor = _Lookup.apply(main_grad.weight, main_grad, ids, masked)
    return out


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, main_grad: MainGrad, ids: Tensor, masked: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(ids, masked)
        ctx.main_grad = main_grad
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        from cppmega.ops.pointwise import embedding_triton as kernels

        ids, masked = ctx.saved_tensors
        rows = ids + 1
        if masked is not None:
            # All of them have the same id: in the sum, they would be one long run of zeros.
            rows = rows.masked_fill(masked, 0)
        if rows.dim() == 2 and gradient.transpose(0, 1).is_contiguous():
            # Megatron transposes [b, s] to [s, b] after the lookup.
            rows, gradient = rows.t(), gradient.transpose(0, 1)
        ascending, order = rows.flatten().int().sort(stable=True)
        total = ctx.main_grad.buffer
        flat = gradient.reshape(rows.numel(), total.size(1)).contiguous()
        kernels.add(ascending, order, flat, total)
        return ctx.main_grad.added_in_pass(), None, None, None
