"""A GELU whose rows are weighted, and its gradients, in torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def weighted_gelu(x: Tensor, weights: Tensor) -> Tensor:
    """`gelu(x) * weights`, in the precision of the weights, rounded once to the type of x.

    Args:
        x: `[rows, width]`.
        weights: fp32 or fp64 `[rows, 1]`.

    Returns:
        `[rows, width]` in the type of x.
    """
    return (functional.gelu(x.to(weights.dtype)) * weights).to(x.dtype)


def gradients(x: Tensor, weights: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x, in its type, and of the weights, for that of the result.

    Args:
        x: `[rows, width]`.
        weights: fp32 or fp64 `[rows, 1]`.
        given: `[rows, width]`.
    """
    wide = weights.dtype
    of_gelu = given.to(wide) * weights
    of_x = torch.ops.aten.gelu_backward(of_gelu, x.to(wide)).to(x.dtype)
    of_weights = (given.to(wide) * functional.gelu(x.to(wide))).sum(-1, keepdim=True)
    return of_x, of_weights
