"""The autograd function of M2RNN; `m2rnn` has checked shapes and arranged strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cppmega.ops import m2rnn_backward_triton as backwards
from cppmega.ops import m2rnn_forward_triton as forwards


class Recurrence(torch.autograd.Function):
    """`m2rnn(q, k, v, transition, log_decay, bounds)`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        transition: Tensor,
        log_decay: Tensor,
        bounds: Tensor | None,
    ) -> Tensor:
        decay, fresh = log_decay.exp(), -torch.expm1(log_decay)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        states = forwards.saved_states(v, k.size(-1)) if any(ctx.needs_input_grad) else None
        forwards.forward(q, k, v, transition, decay, fresh, bounds, states, out)
        ctx.save_for_backward(q, k, v, transition, log_decay, bounds, states)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, transition, log_decay, bounds, states = ctx.saved_tensors
        s, b, heads, width = v.shape
        key_dim = k.size(-1)
        count = backwards.programs(b if bounds is None else len(bounds) - 1)
        like: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
        d_q, d_k = (torch.empty(s, b, heads, key_dim, **like) for _ in range(2))
        d_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        d_weight = torch.empty(count, *transition.shape, **like)
        d_log_decay = torch.empty_like(log_decay)
        within = torch.empty(count, heads, forwards.CHUNK, key_dim, width, **like)
        backwards.backward(
            *(q, k, v, transition, log_decay.exp(), -torch.expm1(log_decay), bounds, states),
            *(gradient.contiguous(), within, d_q, d_k, d_v, d_weight, d_log_decay),
        )
        return (
            d_q.sum(2).to(q.dtype),
            d_k.sum(2).to(k.dtype),
            d_v,
            d_weight.sum(0).to(transition.dtype),
            d_log_decay,
            None,
        )
