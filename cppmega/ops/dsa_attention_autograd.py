"""DSA's absorbed sparse attention on CUDA for autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cppmega.ops.dsa_attention_backward_triton import Backward
from cppmega.ops.dsa_attention_forward_triton import Attended, forward
from cppmega.ops.dsa_attention_wide_backward_triton import WideBackward
from cppmega.ops.dsa_attention_wide_triton import WideAttention
from cppmega.ops.dsa_attention_wide_triton import forward as wide_forward


class _Absorbed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value_width: int,
        indices: Tensor,
        softmax_scale: float,
        starts: Tensor | None,
        ends: Tensor | None,
        repeatable: bool | None,
        differentiable: bool,
    ) -> Tensor:
        terms = (query, key, value_width, indices, softmax_scale, starts, ends)
        if is_wide(query, value_width):
            attended = wide_forward(WideAttention(*terms), want_rest=differentiable)
        else:
            attended = forward(*terms, want_rest=differentiable)
        if differentiable:
            ctx.save_for_backward(query, key, indices, starts, ends, *attended)
            ctx.call = value_width, softmax_scale, repeatable
        return attended.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, indices, starts, ends, *attended = ctx.saved_tensors
        width, scale, repeatable = ctx.call
        if repeatable is None:
            repeatable = torch.are_deterministic_algorithms_enabled()
        terms = (query, key, width, indices, scale, starts, ends)
        call: Backward | WideBackward
        if is_wide(query, width):
            call = WideBackward(WideAttention(*terms), Attended(*attended), grad)
        else:
            call = Backward(*terms, Attended(*attended), grad)
        return *call.gradients(repeatable=repeatable), *(None,) * 7


def is_wide(query: Tensor, value_width: int) -> bool:
    """Whether a latent part takes the wide kernels."""
    return value_width > 128 or query.size(3) - value_width > 128


def rows(x: Tensor) -> Tensor:
    """A tensor whose rows are contiguous, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def absorbed(
    query: Tensor,
    key: Tensor,
    value_width: int,
    indices: Tensor,
    softmax_scale: float,
    starts: Tensor | None,
    ends: Tensor | None,
    *,
    repeatable: bool | None = None,
) -> Tensor:
    """Attend; arguments as of `dsa_attention.sparse_attention`."""
    differentiable = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    out: Tensor = _Absorbed.apply(  # type: ignore[no-untyped-call]
        rows(query), rows(key), value_width, indices.contiguous(), softmax_scale,
        starts, ends, repeatable, differentiable,
    )  # fmt: skip
    return out
