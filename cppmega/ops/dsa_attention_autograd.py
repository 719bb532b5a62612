"""DSA's absorbed sparse attention on CUDA for autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cppmega.ops import dsa_attention_backward_triton as backward
from cppmega.ops import dsa_attention_forward_triton as forward


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
        differentiable: bool,
    ) -> Tensor:
        want_rest = differentiable and backward.wants_rest(query, value_width, indices)
        attended = forward.forward(
            query, key, value_width, indices, softmax_scale, starts, ends, want_rest=want_rest
        )
        if differentiable:
            ctx.save_for_backward(query, key, indices, starts, ends, *attended)
            ctx.value_width, ctx.softmax_scale = value_width, softmax_scale
        return attended.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, indices, starts, ends, *attended = ctx.saved_tensors
        dq, dkv = backward.backward(
            query,
            key,
            ctx.value_width,
            indices,
            ctx.softmax_scale,
            starts,
            ends,
            forward.Attended(*attended),
            grad,
        )
        return dq, dkv, None, None, None, None, None, None


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
) -> Tensor:
    """Attend; arguments as of `dsa_attention.sparse_attention`."""
    differentiable = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    out: Tensor = _Absorbed.apply(  # type: ignore[no-untyped-call]
        rows(query), rows(key), value_width, indices.contiguous(), softmax_scale,
        starts, ends, differentiable,
    )  # fmt: skip
    return out
