"""The linear layers of a group of experts, each applied to its own tokens, in one grouped GEMM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.main_grad import MainGrad
from cppmega.ops.common.once_differentiable import once_differentiable

Products = Callable[..., Any]
"""Transformer Engine's `general_grouped_gemm`."""


def grouped_linear(
    x: Tensor,
    splits: Sequence[int],
    weights: Sequence[Tensor],
    products: Products,
    *,
    fused: bool = False,
    first: bool = False,
) -> Tensor:
    """`x[i] @ weights[i % len(weights)].T` for the i-th part of the rows of x, summed in fp32.

    Args:
        x: `[tokens, K]`, bf16 or fp16.
        splits: the rows of each part, which may have none; they sum to `tokens`. There may be
            several rounds of parts, each with one part for each weight.
        weights: as many as a round has parts, `[N, K]` each, of the type of x.
        products: computes all products of one kind.
        fused: whether Megatron's gradient accumulation fusion is on, with which the gradients of
            the weights go to their `main_grad`, in the type of that.
        first: whether the gradients of this call replace the contents of `main_grad`, which are
            zero in the first micro-batch of a step.

    Returns:
        `[tokens, N]`.

    Raises:
        ValueError: there are no weights, or the parts are no whole rounds.
    """
    if not weights:
        raise ValueError("there are no weights, which have the number of output columns")
    if not splits or len(splits) % len(weights):
        raise ValueError(f"{len(splits)} parts of {len(weights)} weights")
    choice = (list(splits), products, fused, first)
    out: Tensor = _GroupedLinear.apply(x, choice, *weights)
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, choice: tuple[list[int], Products, bool, bool], *weights: Tensor
    ) -> Tensor:
        splits, products, fused, first = choice
        ctx.save_for_backward(x, *weights)
        ctx.splits, ctx.products, ctx.first = splits, products, first
        main_grads = [MainGrad.of(weight) for weight in weights] if fused else [None]
        ctx.main_grads = None if None in main_grads else main_grads
        out = x.new_empty(len(x), len(weights[0]))
        each = weights * (len(splits) // len(weights))
        _compute(products, each, x.split_with_sizes(splits), [out], splits, "TN")
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        parts = gradients[0].contiguous().split_with_sizes(ctx.splits)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            each = weights * (len(parts) // len(weights))
            _compute(ctx.products, each, parts, [d_x], ctx.splits, "NN")
        d_weights: Sequence[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            d_weights = _weight_gradients(ctx, x.split_with_sizes(ctx.splits), parts, weights)
        return (d_x, None, *d_weights)


def _weight_gradients(
    ctx: Any, inputs: Sequence[Tensor], gradients: Sequence[Tensor], weights: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The gradients of the weights, or the values to return if `main_grad` received them."""
    main_grads: list[MainGrad] | None = ctx.main_grads
    experts = len(weights)
    if main_grads is None:
        # The sums of several rounds are rounded once, at their end.
        dtype = weights[0].dtype if len(inputs) == experts else torch.float32
        own = weights[0].new_empty(experts, *weights[0].shape, dtype=dtype)
        to = list(own.unbind())
    else:
        to = [main_grad.buffer for main_grad in main_grads]
    adds = main_grads is not None and not ctx.first
    for start in range(0, len(inputs), experts):
        part = slice(start, start + experts)
        own_splits = ctx.splits[part]
        _compute(ctx.products, inputs[part], gradients[part], to, own_splits, "NT", accumulate=adds)
        adds = True
    if main_grads is None:
        return list(own.to(weights[0].dtype).unbind())
    return [main_grad.added() for main_grad in main_grads]


def _compute(
    products: Products,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    out: list[Tensor],
    splits: list[int],
    layout: str,
    **more: bool,
) -> None:
    """Compute products without quantization.

    Products for tokens (TN, NN) are written consecutively into one tensor; products for weights
    (NT) into one tensor each.
    """
    own = {"grad": layout != "TN", "single_output": layout != "NT"}
    quantizers = [None] * len(a)
    products(a, b, out, quantizers, out[0].dtype, layout=layout, m_splits=splits, **own, **more)
