"""The product that adds the gradient of a weight to the gradients of earlier micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor

MIXED: bool = "dtype_out" in torch.ops.aten.addmm.overloads()
"""Whether a product on a GPU can have another type than its factors: PyTorch since 2.8."""


def adds_in_one_product(x: Tensor, total: Tensor) -> bool:
    """Whether `add_weight_gradient` is one product, for an x and a sum of these types on a GPU."""
    return total.dtype == x.dtype or MIXED


def add_weight_gradient(x: Tensor, gradient: Tensor, total: Tensor) -> None:
    """total += gradient.T @ x, in place, summed in fp32 and rounded once to the type of `total`.

    On a GPU it is one product that reads and writes `total`, if PyTorch has it; up to 2.7, the
    factors are converted to the type of `total`. Arguments are those of apex's
    `fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32` and `..._fp16`.

    Args:
        x: `[tokens, K]`.
        gradient: that of the layer's output, `[tokens, N]`, in the type of x.
        total: `[N, K]`, in fp32 or the type of x.
    """
    if total.dtype == x.dtype:
        torch.addmm(total, gradient.t(), x, out=total)
    elif x.is_cuda and MIXED:
        torch.addmm(total, gradient.t(), x, out_dtype=total.dtype, out=total)
    else:
        total.add_(gradient.t().to(total.dtype) @ x.to(total.dtype))
