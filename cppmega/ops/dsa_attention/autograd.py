"""The autograd function of DSA's absorbed sparse attention on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.dsa_attention import forward_triton as narrow
from cppmega.ops.dsa_attention import wide_triton as wide
from cppmega.ops.dsa_attention.backward_triton import Backward
from cppmega.ops.dsa_attention.problem import Absorbed, Attended
from cppmega.ops.dsa_attention.wide_backward_triton import WideBackward


class _Absorbed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, call: Absorbed, repeatable: bool | None, keep: bool
    ) -> Tensor:
        attend = wide.forward if call.is_wide else narrow.forward
        attended = attend(call, want_rest=keep)
        if keep:
            kept = call.query, call.key, call.indices, call.starts, call.ends
            ctx.save_for_backward(*kept, *attended)
            ctx.call = call.value, call.softmax_scale, repeatable
        return attended.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, indices, starts, ends, *attended = ctx.saved_tensors
        value, scale, repeatable = ctx.call
        if repeatable is None:
            repeatable = torch.are_deterministic_algorithms_enabled()
        call = Absorbed(query, key, value, indices, scale, starts, ends)
        backward = WideBackward if call.is_wide else Backward
        work = backward(call, Attended(*attended), grad)
        return *work.gradients(repeatable=repeatable), None, None, None


def absorbed(call: Absorbed, *, repeatable: bool | None = None) -> Tensor:
    """Compute the attention; see `dsa_attention.sparse_attention`."""
    query, key = call.query, call.key
    keep = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    out: Tensor = _Absorbed.apply(query, key, call.contiguous(), repeatable, keep)
    return out
