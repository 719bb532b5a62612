"""The autograd function of DSA's sparse attention with a key per head.

The backward keeps the inputs, the indices and the bounds, the output, its rounding error and the
log-sum-exp of each row. It recomputes the bits of the chosen keys, which take `b * sq * sk / 8`
bytes, and twice as many in the backward. Queries are processed in parts of at most `BITS_BYTES` of
bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.bounds import RowBounds
from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.dsa_attention.bits_triton import WHOLE, Bits
from cppmega.ops.dsa_attention.per_head_triton import Gradients, Heads

BITS_BYTES = 1 << 29
"""Maximum memory of a part's bits, by query: there is one part up to 64k queries and keys."""


def _parts(sq: int, sk: int, batch: int) -> list[tuple[int, int]]:
    """The first query, and the query after the last, of each part."""
    row = batch * -(-sk // WHOLE) * WHOLE // 8
    step = max(WHOLE, BITS_BYTES // max(row, 1) // WHOLE * WHOLE)
    return [(first, min(sq, first + step)) for first in range(0, sq, step)]


class _PerHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        indices: Tensor,
        starts: Tensor | None,
        ends: Tensor | None,
        softmax_scale: float,
        want_gradients: bool,
    ) -> Tensor:
        heads, indices = Heads(query, key, value, softmax_scale), indices.contiguous()
        bounds = RowBounds.of(starts, ends, heads.batch, heads.sq, indices)
        out, rest, lse = heads.outputs(want_gradients)
        if out.numel():
            for part in _parts(heads.sq, heads.sk, heads.batch):
                heads.forward(Bits(indices, heads.sk, part, bounds, across=False), out, rest, lse)
        if want_gradients:
            ctx.save_for_backward(query, key, value, indices, starts, ends, out, rest, lse)
            ctx.softmax_scale = softmax_scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        query, key, value, indices, starts, ends, out, rest, lse = ctx.saved_tensors
        if not out.numel() or not key.numel():
            return (*(x.new_zeros(x.shape) for x in (query, key, value)), *(None,) * 5)
        heads = Heads(query, key, value, ctx.softmax_scale)
        bounds = RowBounds.of(starts, ends, heads.batch, heads.sq, indices)
        parts = _parts(heads.sq, heads.sk, heads.batch)
        gradients = Gradients(heads, upstream, out, rest, lse, len(parts))
        for part in parts:
            gradients.write(Bits(indices, heads.sk, part, bounds, across=True))
        return (gradients.dq, *gradients.of_keys_and_values(), *(None,) * 5)


def per_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    softmax_scale: float,
    starts: Tensor | None,
    ends: Tensor | None,
) -> Tensor:
    """Compute the attention over the chosen keys.

    Args:
        query: `[sq, b, heads, d]`.
        key: `[sk, b, heads or 1, d]`.
        value: `[sk, b, heads or 1, v]`.
        indices: as for `dsa_attention.sparse_attention`.
        softmax_scale: factor on the products.
        starts: first key of a row, `[sq]` or `[b, sq]`; None for both is causal.
        ends: the key after the last one of a row.

    Returns:
        `[sq, b, heads, v]` in the type of the query, 0 for a query that sees no key.
    """
    tensors = (query, key, value)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    out: Tensor = _PerHead.apply(*tensors, indices, starts, ends, softmax_scale, wanted)
    return out
