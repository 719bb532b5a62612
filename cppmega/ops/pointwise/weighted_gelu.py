"""A GELU whose rows are weighted, as in experts, in one kernel per direction.

`weighted_gelu_naive` defines it. Megatron's unfused code computes the GELU in 16 bits and its
product with the router's fp32 probability in fp32: three kernels forward and eight backward, most
of which read or write fp32. Here each element is read and written once in its own type; the GELU
stays in registers and is not saved for the backward pass. Results repeat to the bit. Megatron's
code compiled by torch for one shape is a tenth faster (`experts_glue_h200`); the number of rows of
experts differs in every step, and what torch.compile does then has not been measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.dispatch import TYPES, has_triton
from cppmega.ops.common.once_differentiable import once_differentiable


def obstacle(x: Tensor, weights: Tensor) -> str | None:
    """Why the kernel does not support a call on a GPU, as a clause; None if it does."""
    if not has_triton():
        return "triton is not installed"
    if x.dtype not in TYPES or weights.dtype != torch.float32:
        return f"rows of {x.dtype} have weights of {weights.dtype}"
    if x.dim() != 2 or weights.shape != (x.size(0), 1):
        return f"rows {list(x.shape)} have weights {list(weights.shape)}"
    return None


def weighted_gelu(x: Tensor, weights: Tensor) -> Tensor:
    """Compute `weighted_gelu_naive.weighted_gelu` with the kernel.

    Args:
        x: `[rows, width]`, bf16, fp16 or fp32.
        weights: fp32 `[rows, 1]`.

    Returns:
        `[rows, width]` in the type of x, contiguous.
    """
    out: Tensor = _WeightedGelu.apply(x, weights)
    return out


class _WeightedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        from cppmega.ops.pointwise import weighted_gelu_triton as kernels

        x, weights = x.contiguous(), weights.contiguous()
        ctx.save_for_backward(x, weights)
        out = torch.empty_like(x)
        kernels.weigh(x, weights, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor]:
        from cppmega.ops.pointwise import weighted_gelu_triton as kernels

        x, weights = ctx.saved_tensors
        of_x, of_weights = torch.empty_like(x), torch.empty_like(weights)
        kernels.gradients(x, weights, given.contiguous(), of_x, of_weights)
        return of_x, of_weights
