"""Linear layers whose weight gradient is added to Megatron's sum, of any width.

A product with bf16 rows that do not begin at multiples of 16 bytes runs in kernels that are several
times as slow. Such a weight is padded by rows of zeros for the product only: the padding has no
gradient and is in no checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cppmega.ops.common.main_grad import MainGrad
from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.common.weight_gradient import MIXED, add_weight_gradient

BYTES = 16
"""Fast kernels need rows whose length in bytes is a multiple of this."""


def padding(width: int, dtype: torch.dtype) -> int:
    """The number of columns to add to a product of `width` columns."""
    return -width % (BYTES // dtype.itemsize)


def linear(x: Tensor, weight: Tensor, fused: bool = False) -> Tensor:
    """`x @ weight.T`, summed in fp32.

    Args:
        x: `[..., K]`.
        weight: `[N, K]`, of the type of x.
        fused: whether Megatron's gradient accumulation fusion is on, with which the gradient of
            the weight is added to its `main_grad`, in the type of that.

    Returns:
        `[..., N]`.
    """
    out: Tensor = _Linear.apply(x, weight, fused, 0)
    return out


def padded_linear(x: Tensor, weight: Tensor, fused: bool = False) -> Tensor:
    """Compute `linear`, followed by columns of zeros.

    Returns:
        `[..., N + padding(N)]`. The gradients of the added columns are ignored.
    """
    added = padding(len(weight), weight.dtype)
    out: Tensor = _Linear.apply(x, weight, fused, added)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fused: bool, added: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad, ctx.added = MainGrad.of(weight) if fused else None, added
        return x @ _padded(weight, added).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = gradient @ _padded(weight, ctx.added)  # its added rows are zeros
        if ctx.needs_input_grad[1]:
            rows, of_rows = x.flatten(0, -2), gradient.flatten(0, -2)
            d_weight = _weight_gradient(rows, of_rows, weight, ctx.main_grad)
        return d_x, d_weight, None, None


def _weight_gradient(
    x: Tensor, gradient: Tensor, weight: Tensor, main: MainGrad | None
) -> Tensor | None:
    """The gradient of a weight, or the value to return if it was added to `main_grad`."""
    if main is None:
        return _product(gradient.t(), x, weight.dtype)[: len(weight)]
    if gradient.shape[1] == len(weight):
        add_weight_gradient(x, gradient, main.buffer)
    else:
        # The product has rows for the padding, too, and is added without them.
        main.buffer.add_(_product(gradient.t(), x, main.buffer.dtype)[: len(weight)])
    return main.added()


def _padded(weight: Tensor, added: int) -> Tensor:
    if not weight.numel():  # which `pad` refuses up to torch 2.8
        return weight.new_zeros(len(weight) + added, weight.size(1))
    return pad(weight, (0, 0, 0, added)) if added else weight


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b`, rounded once to the given type."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda and MIXED:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)
