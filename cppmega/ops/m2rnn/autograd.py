"""The autograd function of M2RNN; `m2rnn` has checked shapes and arranged strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.m2rnn import backward_triton, forward_triton


class Recurrence(torch.autograd.Function):
    """`m2rnn(q, k, v, transition, log_decay, bounds, gradient_clipping)`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        transition: Tensor,
        log_decay: Tensor,
        bounds: Tensor | None,
        gradient_clipping: float | None,
    ) -> Tensor:
        decay, fresh = log_decay.exp(), -torch.expm1(log_decay)
        parts = forward_triton.parts(k.size(-1))
        out = torch.empty(parts, *v.shape, dtype=_of_parts(parts, v), device=v.device)
        states = forward_triton.saved_states(v, k.size(-1)) if any(ctx.needs_input_grad) else None
        forward_triton.forward(q, k, v, transition, decay, fresh, bounds, states, out)
        ctx.save_for_backward(q, k, v, transition, log_decay, bounds, states)
        ctx.gradient_clipping = gradient_clipping
        return _sum(out, v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, transition, log_decay, bounds, states = ctx.saved_tensors
        s, b, heads, width = v.shape
        key_dim = k.size(-1)
        if not (v.numel() and key_dim):
            return *map(torch.zeros_like, (q, k, v, transition, log_decay)), None, None
        count = backward_triton.programs(b if bounds is None else len(bounds) - 1)
        parts = forward_triton.parts(key_dim)
        like: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
        d_q, d_k = (torch.empty(s, b, heads, key_dim, **like) for _ in range(2))
        d_v = torch.empty(parts, *v.shape, dtype=_of_parts(parts, v), device=v.device)
        d_weight = torch.empty(count * parts, *transition.shape, **like)
        d_log_decay = torch.empty(parts, *log_decay.shape, **like)
        within = backward_triton.memory_within(count * parts, heads, key_dim, width, v.device)
        backward_triton.backward(
            *(q, k, v, transition, log_decay.exp(), -torch.expm1(log_decay), bounds, states),
            *(gradient.contiguous(), within, d_q, d_k, d_v, d_weight, d_log_decay),
            ctx.gradient_clipping,
        )
        return (
            d_q.sum(2).to(q.dtype),
            d_k.sum(2).to(k.dtype),
            _sum(d_v, v.dtype),
            d_weight.sum(0).to(transition.dtype),
            _sum(d_log_decay, torch.float32),
            *(None, None),
        )


def _of_parts(parts: int, v: Tensor) -> torch.dtype:
    """The type of sums over some rows; rounded here if they are all of the rows."""
    return v.dtype if parts == 1 else torch.float32


def _sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of the contributions of all rows."""
    return parts[0] if len(parts) == 1 else parts.sum(0).to(dtype)
