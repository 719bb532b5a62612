"""DSA's sparse attention, absorbed and wide (576/512), on CUDA: the backward.

A single kernel for the gradients of a query and of the keys that it chose would need 290 KiB of
accumulators, but a multiprocessor has 256. So three kernels divide the work, for as many queries at
a time as the scratch memory of P and dS holds:

- `_scores_kernel` gathers the keys, and writes dS and P `[2, heads, topk]` of each query, in the
  type of the inputs, as products need them. Delta is the sum of dO * (out + rest) in fp32.
- `_query_kernel` multiplies dS by the gathered keys, for dq.
- `_key_kernel` multiplies [dS | P]^T by [Q ; dO], one product over all heads, for the contribution
  of a query to the gradient of each key it chose. This is added to dkv by fp32 atomics, or written
  once, in fp32, and summed in a fixed order (see `dsa_attention_order_triton`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.device import contiguous_rows
from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.tiles_triton import LOG2_E
from cppmega.ops.dsa_attention.order_triton import Order, bounds_of_row, place_of
from cppmega.ops.dsa_attention.problem import Absorbed, Attended
from cppmega.ops.dsa_attention.wide_tiles import padded_heads
from cppmega.ops.dsa_attention.wide_triton import chosen_keys, slots_in_use, wide_tiles

SCRATCH_BYTES = 1 << 29
"""Maximum memory of P and dS. A query with 128 heads and 2048 keys takes 1 MiB."""

ORDERED_BYTES = 1 << 30
"""The same for the contributions to the gradients of keys: 4.5 MiB for such a query."""

SLOTS = 64
"""Rows of P, and `slots_in_use`, are multiples of this; the keys of every tile divide it."""


@triton.jit  # type: ignore[untyped-decorator]
def _rows_of_keys(key, at, k_row, V: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first columns of some keys and, if there are any, their remaining ones; 0 where -1."""
    here = (at >= 0)[:, None]
    k_at = key + at.to(tl.int64)[:, None] * k_row
    keys = tl.load(k_at + tl.arange(0, V)[None, :], mask=here, other=0.0)
    turned = keys
    if R > 0:
        turned = tl.load(k_at + V + tl.arange(0, R)[None, :], mask=here, other=0.0)
    return keys, turned


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _scores_kernel(  # type: ignore[no-untyped-def]
    query, key, indices, starts, ends, out, rest, lse, grad, made,
    scale, log_scale, batch, sq, sk, topk, slots, q0,
    q_row, q_batch, q_head, k_row, k_batch, g_row, g_batch, g_head, bound_batch, bound_row,
    HEADS: tl.constexpr, PADDED: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """dS and P of a query and a block of heads.

    With AHEAD, the next block of keys is held in registers, for lack of shared memory.
    """
    near = (tl.program_id(0) // (PADDED // BLOCK)).to(tl.int64)
    b, s_at = near % batch, q0 + near // batch
    start, end = bounds_of_row(starts, ends, b, s_at, sq, sk, bound_batch, bound_row, CAUSAL)
    heads = tl.program_id(0) % (PADDED // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    inside = (heads < HEADS)[:, None]
    lane = tl.arange(0, KEYS)
    d = tl.arange(0, V)
    g_at = grad + b * g_batch + s_at * g_row + heads[:, None] * g_head + d[None, :]
    first_out = (s_at * batch + b) * (HEADS * V)
    place = heads[:, None] * V + d[None, :]
    upstream = tl.load(g_at, mask=inside, other=0.0)
    exact = tl.load(out + first_out + place, mask=inside, other=0.0).to(tl.float32)
    exact += tl.load(rest + first_out + place, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(exact * upstream.to(tl.float32), axis=1)
    q_at = query + b * q_batch + s_at * q_row + heads[:, None] * q_head
    latent = tl.load(q_at + d[None, :], mask=inside, other=0.0)
    if R > 0:
        e = V + tl.arange(0, R)
        rotary = tl.load(q_at + e[None, :], mask=inside, other=0.0)
    row = b * sq + s_at
    own = tl.load(lse + (s_at * batch + b) * HEADS + heads, mask=heads < HEADS, other=float("inf"))
    key += b * k_batch
    indices += row * topk
    into = made + (near * 2 * PADDED + heads)[:, None] * slots + lane[None, :]
    at = chosen_keys(indices, lane, topk, start, end)
    if AHEAD:
        keys, turned = _rows_of_keys(key, at, k_row, V, R)
    for first in range(0, slots_in_use(indices, topk, start, end), KEYS):
        following = chosen_keys(indices, first + KEYS + lane, topk, start, end)
        if not AHEAD:
            keys, turned = _rows_of_keys(key, at, k_row, V, R)
        s = tl.dot(latent, tl.trans(keys), input_precision="ieee") * log_scale
        if R > 0:
            # Scaled separately, as in the forward, so that warps share both products' columns.
            s += tl.dot(rotary, tl.trans(turned), input_precision="ieee") * log_scale
        if AHEAD:
            next_keys, turned = _rows_of_keys(key, following, k_row, V, R)
        dp = tl.dot(upstream, tl.trans(keys), input_precision="ieee")
        p = tl.exp2(tl.where((at >= 0)[None, :], s - own[:, None], float("-inf")))
        ds = p * ((dp - delta[:, None]) * scale)
        tl.store(into + first, ds.to(made.dtype.element_ty))
        tl.store(into + PADDED * slots + first, p.to(made.dtype.element_ty))
        at = following
        if AHEAD:
            keys = next_keys


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _query_kernel(  # type: ignore[no-untyped-def]
    key, indices, starts, ends, made, dq, batch, sq, sk, topk, slots, q0,
    k_row, k_batch, bound_batch, bound_row,
    HEADS: tl.constexpr, PADDED: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    FIRST: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Some columns of dq of a query and a block of heads."""
    column = FIRST + tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    block = tl.program_id(0) // PARTS
    near = (block // (PADDED // BLOCK)).to(tl.int64)
    b, s_at = near % batch, q0 + near // batch
    start, end = bounds_of_row(starts, ends, b, s_at, sq, sk, bound_batch, bound_row, CAUSAL)
    heads = block % (PADDED // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, KEYS)
    key += b * k_batch
    indices += (b * sq + s_at) * topk
    from_ = made + (near * 2 * PADDED + heads)[:, None] * slots + lane[None, :]
    acc = tl.zeros([BLOCK, COLUMNS], tl.float32)
    at = chosen_keys(indices, lane, topk, start, end)
    for first in range(0, slots_in_use(indices, topk, start, end), KEYS):
        k_at = key + at.to(tl.int64)[:, None] * k_row + column[None, :]
        keys = tl.load(k_at, mask=(at >= 0)[:, None], other=0.0)
        acc = tl.dot(tl.load(from_ + first), keys, acc, input_precision="ieee")
        at = chosen_keys(indices, first + KEYS + lane, topk, start, end)
    place = ((s_at * batch + b) * HEADS + heads)[:, None] * (V + R) + column[None, :]
    tl.store(dq + place, acc.to(dq.dtype.element_ty), mask=(heads < HEADS)[:, None])


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _key_kernel(  # type: ignore[no-untyped-def]
    query, indices, starts, ends, grad, made, bits, of_word, words, region, into,
    batch, sq, sk, topk, slots, q0,
    q_row, q_batch, q_head, g_row, g_batch, g_head, bound_batch, bound_row,
    HEADS: tl.constexpr, PADDED: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr,
    CAUSAL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Some columns of the contributions of a query to the gradients of its keys."""
    column = FIRST + tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    near = (tl.program_id(0) // PARTS).to(tl.int64)
    b, s_at = near % batch, q0 + near // batch
    start, end = bounds_of_row(starts, ends, b, s_at, sq, sk, bound_batch, bound_row, CAUSAL)
    # Queries, then upstream gradients, form the rows of one matrix; values have no rotary columns.
    SIDES: tl.constexpr = 2 if FIRST < V else 1
    side = tl.arange(0, SIDES * PADDED)
    head = side % PADDED
    inside = (head < HEADS)[:, None]
    of_query = (side < PADDED)[:, None]
    q_at = query + b * q_batch + s_at * q_row + head[:, None] * q_head + column[None, :]
    both = tl.load(q_at, mask=inside & of_query, other=0.0)
    if SIDES == 2:
        g_at = grad + b * g_batch + s_at * g_row + head[:, None] * g_head + column[None, :]
        gradients = tl.load(g_at, mask=inside & (side >= PADDED)[:, None], other=0.0)
        both = tl.where(of_query, both, gradients)
    lane = tl.arange(0, KEYS)
    row = b * sq + s_at
    indices += row * topk
    from_ = made + (near * 2 * PADDED + side)[:, None] * slots + lane[None, :]
    for first in range(0, slots_in_use(indices, topk, start, end), KEYS):
        slot = first + lane
        at = chosen_keys(indices, slot, topk, start, end)
        share = tl.dot(tl.trans(tl.load(from_ + first)), both, input_precision="ieee")
        if ADD:
            to = into + (b * sk + at)[:, None] * (V + R) + column[None, :]
            tl.atomic_add(to, share, mask=(at >= 0)[:, None], sem="relaxed")
        else:
            place = place_of(bits, of_word, b, at, (s_at - q0).to(tl.int32), at >= 0, sk, words)
            to = into + (b * region + place)[:, None] * (V + R) + column[None, :]
            tl.store(to, share.to(into.dtype.element_ty), mask=(at >= 0)[:, None])


@dataclass(frozen=True)
class WideBackward:
    """The backward of one call.

    Attributes:
        call: the call.
        attended: the results of its forward.
        grad: the gradient of its output, `[sq, b, heads, v]`.
    """

    call: Absorbed
    attended: Attended
    grad: Tensor

    def parts(self, *, ordered: bool) -> list[tuple[int, int]]:
        """The first query, and the query after the last, of each part that fits in the scratch."""
        (batch, sq, topk), room = self.call.indices.shape, SCRATCH_BYTES
        of_query = self._scratch_of(1)
        if ordered:
            of_query += batch * topk * self.call.key.size(3) * 4
            room = ORDERED_BYTES
        step = max(1, room // max(1, of_query))
        return [(first, min(sq, first + step)) for first in range(0, sq, step)]

    def _padded(self) -> int:
        return padded_heads(self.call.heads, wide_tiles(self.call).scores)

    def _slots(self) -> int:
        """The chosen keys of a row, padded to complete tiles."""
        return max(1, int(triton.cdiv(self.call.indices.size(2), SLOTS))) * SLOTS

    def _scratch_of(self, queries: int) -> int:
        batch, size = self.call.indices.size(0), self.call.query.element_size()
        return queries * batch * 2 * self._padded() * self._slots() * size

    def scores(self, part: tuple[int, int]) -> Tensor:
        """dS and P of a part's queries, `[queries, b, 2, heads, topk]`, up to their last keys."""
        call, grad = self.call, contiguous_rows(self.grad)
        batch, padded, slots = call.indices.size(0), self._padded(), self._slots()
        made = call.query.new_empty(part[1] - part[0], batch, 2, padded, slots)
        starts, ends, bound_strides, _ = call.bounds
        tile, scale = wide_tiles(call).scores, call.softmax_scale
        if made.numel():
            _scores_kernel[(made.size(0) * batch * padded // tile.heads,)](
                call.query, call.key, call.indices, starts, ends, *self.attended,
                grad, made, scale, scale * LOG2_E, *call.sizes(), slots, part[0],
                *call.strides(), *grad.stride()[:3], *bound_strides,
                PADDED=padded, BLOCK=tile.heads, KEYS=tile.keys, AHEAD=tile.stages == 1,
                num_warps=tile.warps, num_stages=tile.stages, **call.common(),
            )  # fmt: skip
        return made

    def gradient_of_queries(self, part: tuple[int, int], made: Tensor, dq: Tensor) -> None:
        """Write the rows of one part of dq `[sq, b, heads, d]`."""
        call, tile = self.call, wide_tiles(self.call).queries
        starts, ends, bound_strides, _ = call.bounds
        blocks = made.size(0) * made.size(1) * max(1, made.size(3) // tile.heads)
        for first, width in ((0, call.value), (call.value, call.rotary)):
            columns = min(tile.columns, width)
            if columns and made.numel():
                _query_kernel[(blocks * (width // columns),)](
                    call.key, call.indices, starts, ends, made, dq, *call.sizes(),
                    made.size(4), part[0], *call.key.stride()[:2], *bound_strides,
                    PADDED=made.size(3), BLOCK=min(tile.heads, made.size(3)), KEYS=tile.keys,
                    COLUMNS=columns, PARTS=width // columns, FIRST=first,
                    num_warps=tile.warps, num_stages=tile.stages, **call.common(),
                )  # fmt: skip

    def gradient_of_keys(
        self, part: tuple[int, int], made: Tensor, into: Tensor, order: Order | None = None
    ) -> None:
        """Add one part to dkv, or write the contribution of each pair to its own slot.

        Args:
            part: first query, and the query after the last.
            made: its dS and P, as returned by `scores`.
            into: dkv `[b, sk, d]` in fp32, which is added to; with an order, `[b, slots, 1, d]`.
            order: the slots of the part.
        """
        call, grad, tile = self.call, contiguous_rows(self.grad), wide_tiles(self.call).keys
        starts, ends, bound_strides, _ = call.bounds
        places = (call.indices, call.indices, 0, 0)
        if order is not None:
            places = (order.bits, order.first, order.words, into.size(1))
        for first, width in ((0, call.value), (call.value, call.rotary)):
            columns = min(tile.columns, width)
            if columns and made.numel():
                _key_kernel[(made.size(0) * made.size(1) * (width // columns),)](
                    call.query, call.indices, starts, ends, grad, made, *places, into,
                    *call.sizes(), made.size(4), part[0],
                    *call.query.stride()[:3], *grad.stride()[:3], *bound_strides,
                    PADDED=made.size(3), KEYS=tile.keys,
                    COLUMNS=columns, PARTS=width // columns, FIRST=first, ADD=order is None,
                    num_warps=tile.warps, num_stages=tile.stages, **call.common(),
                )  # fmt: skip

    def gradients(self, *, repeatable: bool) -> tuple[Tensor, Tensor]:
        """The gradients of queries and keys, the latter summed in a fixed order or by atomics."""
        call = self.call
        batch, _, sk, topk = call.sizes()
        dq = torch.empty_like(call.query, memory_format=torch.contiguous_format)
        dkv = call.key.new_zeros(batch, sk, call.key.size(3), dtype=torch.float32)
        for part in self.parts(ordered=repeatable):
            made = self.scores(part)
            self.gradient_of_queries(part, made, dq)
            if not repeatable:
                self.gradient_of_keys(part, made, dkv)
                continue
            order = Order(call, part)
            region = (part[1] - part[0]) * topk
            shares = dkv.new_empty(batch, region, 1, dkv.size(2))
            self.gradient_of_keys(part, made, shares, order)
            order.add_up(shares, 0, batch, region, dkv.transpose(0, 1), add=True)
        return dq, dkv.transpose(0, 1).unsqueeze(2).to(call.key.dtype)
