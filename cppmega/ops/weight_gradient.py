"""The product that adds the gradient of a weight to the gradients of earlier micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor


def add_weight_gradient(x: Tensor, gradient: Tensor, total: Tensor) -> None:
    """total += gradient.T @ x, in place, summed in fp32 and rounded once to the type of `total`.

    On a GPU it is one product that reads and writes `total`. Arguments are those of apex's
    `fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32` and `..._fp16`.

    Args:
        x: `[tokens, K]`.
        gradient: that of the layer's output, `[tokens, N]`, in the type of x.
        total: `[N, K]`, in fp32 or the type of x.
    """
    if total.dtype == x.dtype:
        torch.addmm(total, gradient.t(), x, out=total)
    elif x.is_cuda:
        torch.addmm(total, gradient.t(), x, out_dtype=total.dtype, out=total)
    else:
        total.add_(gradient.t().to(total.dtype) @ x.to(total.dtype))
