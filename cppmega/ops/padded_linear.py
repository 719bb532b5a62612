"""A linear layer whose product is as wide as the kernels of matrix products need.

A product with bf16 rows that do not begin at multiples of 16 bytes runs in kernels that are several
times as slow. So the weight is padded by rows of zeros for the product, and stays as it is
otherwise: the padding has no gradient and is in no checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cppmega.ops.main_grad import MainGrad

BYTES = 16
"""What the length of a row must be a multiple of."""


def padding(width: int, dtype: torch.dtype) -> int:
    """The number of columns to add to a product of `width` columns."""
    return -width % (BYTES // dtype.itemsize)


def padded_linear(x: Tensor, weight: Tensor, fused: bool = False) -> Tensor:
    """`x @ weight.T`, followed by columns of zeros.

    Args:
        x: `[..., K]`.
        weight: `[N, K]`, of the type of x.
        fused: whether Megatron's gradient accumulation fusion is on, with which the gradient of
            the weight is added to its `main_grad`, in the type of that.

    Returns:
        `[..., N + padding(N)]`. The gradients of the added columns are ignored.
    """
    out: Tensor = _PaddedLinear.apply(x, weight, fused)  # type: ignore[no-untyped-call]
    return out


class _PaddedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fused: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = MainGrad.of(weight) if fused else None
        return x @ _padded(weight).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = gradient @ _padded(weight)  # its added rows are zeros
        if ctx.needs_input_grad[1]:
            main: MainGrad | None = ctx.main_grad
            dtype = weight.dtype if main is None else main.buffer.dtype
            of_all = _product(gradient.flatten(0, -2).t(), x.flatten(0, -2), dtype)
            d_weight = of_all[: len(weight)]
            if main is not None:
                main.buffer.add_(d_weight)
                d_weight = main.added()
        return d_x, d_weight, None


def _padded(weight: Tensor) -> Tensor:
    return pad(weight, (0, 0, 0, padding(len(weight), weight.dtype)))


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b`, rounded once to the given type."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)
