"""The backward of DSA's absorbed sparse attention on CUDA: one program per query and head block.

A program gathers its chosen keys again and computes, keys by heads,

    P^T = exp(K Q^T - lse)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
    dQ^T = K^T dS^T           dK = dS^T Q + [P^T dO | 0]

dS enters the product for dQ as two terms in the input's type: its sum over the keys is zero, so
where keys resemble one another, the product cancels to a value much smaller than its terms.

dK is the contribution of one query to each of its keys. By default the contributions are
accumulated by fp32 atomics, four numbers at a time. In the deterministic mode each is written once,
in the type of the keys, and summed in a fixed order (see `dsa_attention_order_triton`); P and dS
then enter this product as two terms as well, so that the rounding of the contributions is the only
one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.device import contiguous_rows
from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.tiles_triton import LOG2_E, padded, product
from cppmega.ops.dsa_attention.forward_triton import WARPS, gathered, tiles_of
from cppmega.ops.dsa_attention.order_triton import Order, bounds_of_row, place_of, visible
from cppmega.ops.dsa_attention.problem import Absorbed, Attended

HOPPER_REGISTERS = 168
"""Registers per thread with latent and rotary parts of 64: three programs fit on an SM of sm_90."""

SCRATCH_BYTES = 1 << 28
"""Maximum memory of the contributions held at a time, unless 32 queries need more."""


@triton.jit  # type: ignore[untyped-decorator]
def _contribute(into, columns, x, there, WIDTH: tl.constexpr, ATOMIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add rows to the gradients of keys, or write them to their slots."""
    mask = there[:, None] & (columns < WIDTH)[None, :]
    if ATOMIC:
        tl.atomic_add(into[:, None] + columns[None, :], x, mask=mask, sem="relaxed")
    else:
        tl.store(into[:, None] + columns[None, :], x.to(into.dtype.element_ty), mask=mask)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    query, key, indices, starts, ends, bound_batch, bound_row, out, rest, lse, grad, dq,
    bits, first, contributions, scale, log2_scale, sq, sk, topk, batch, words, b0, q0, part, region,
    q_row, q_batch, q_head, k_row, k_batch, g_row, g_batch, g_head,
    HEADS: tl.constexpr, H: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    R: tl.constexpr, R_PAD: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
    ATOMIC: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    near = tl.program_id(0) % part
    b = (b0 + tl.program_id(0) // part).to(tl.int64)
    s = (q0 + near).to(tl.int64)
    start, end = bounds_of_row(starts, ends, b, s, sq, sk, bound_batch, bound_row, CAUSAL)
    heads = tl.program_id(1) * H + tl.arange(0, H)
    inside = heads < HEADS
    lane, v, r = tl.arange(0, KEYS), tl.arange(0, V_PAD), tl.arange(0, R_PAD)
    chosen = indices + (b * sq + s) * topk
    key += b * k_batch
    rows = query + s * q_row + b * q_batch
    place = (s * batch + b) * HEADS + heads
    q_latent = gathered(rows, heads, inside, q_head, V, V_PAD)
    if R > 0:
        q_rotary = gathered(rows + V, heads, inside, q_head, R, R_PAD)
        sum_rotary = tl.zeros([R_PAD, H], tl.float32)
    sum_latent = tl.zeros([V_PAD, H], tl.float32)
    upstream = gathered(grad + s * g_row + b * g_batch, heads, inside, g_head, V, V_PAD)
    by_row = tl.load(lse + place, mask=inside, other=float("inf"))
    output = gathered(out, place, inside, V, V, V_PAD).to(tl.float32)
    output += gathered(rest, place, inside, V, V, V_PAD).to(tl.float32)
    delta = tl.sum(output * upstream.to(tl.float32), axis=1)
    for block in range(0, topk, KEYS):
        at = tl.load(chosen + block + lane, mask=block + lane < topk, other=-1).to(tl.int32)
        there = visible(at, start, end)
        latent = gathered(key, at, there, k_row, V, V_PAD)
        scores = tl.dot(latent, tl.trans(q_latent), input_precision="ieee")
        if R > 0:
            rotary = gathered(key + V, at, there, k_row, R, R_PAD)
            scores = tl.dot(rotary, tl.trans(q_rotary), scores, input_precision="ieee")
        p = tl.exp2(scores * log2_scale - by_row[None, :])
        p = tl.where(there[:, None], p, 0.0)
        dp = tl.dot(latent, tl.trans(upstream), input_precision="ieee")
        ds = p * (dp - delta[None, :]) * scale
        high = ds.to(latent.dtype)
        low = (ds - high.to(tl.float32)).to(latent.dtype)
        sum_latent = tl.dot(tl.trans(latent), high, sum_latent, input_precision="ieee")
        sum_latent = tl.dot(tl.trans(latent), low, sum_latent, input_precision="ieee")
        if R > 0:
            sum_rotary = tl.dot(tl.trans(rotary), high, sum_rotary, input_precision="ieee")
            sum_rotary = tl.dot(tl.trans(rotary), low, sum_rotary, input_precision="ieee")
        if ATOMIC:
            into = contributions + (at.to(tl.int64) * batch + b) * (V + R)
        else:
            pair = place_of(bits, first, b, at, near, there, sk, words).to(tl.int64)
            pair += (tl.program_id(0) // part).to(tl.int64) * region
            into = contributions + (pair * tl.num_programs(1) + tl.program_id(1)) * (V + R)
        none = tl.zeros([KEYS, V_PAD], tl.float32)
        d_latent = product(p, upstream, product(ds, q_latent, none, SPLIT), SPLIT)
        _contribute(into, v, d_latent, there, V, ATOMIC)
        if R > 0:
            d_rotary = product(ds, q_rotary, tl.zeros([KEYS, R_PAD], tl.float32), SPLIT)
            _contribute(into + V, r, d_rotary, there, R, ATOMIC)
    into_dq = dq + place * (V + R)
    rounded_dq = sum_latent.to(dq.dtype.element_ty)
    tl.store(into_dq[None, :] + v[:, None], rounded_dq, mask=inside[None, :] & (v < V)[:, None])
    if R > 0:
        rounded_dq = sum_rotary.to(dq.dtype.element_ty)
        into_dq += V
        tl.store(into_dq[None, :] + r[:, None], rounded_dq, mask=inside[None, :] & (r < R)[:, None])


def parts(sq: int, batch: int, bytes_of_query: int) -> tuple[int, int]:
    """The number of queries, and of batch elements, whose contributions are held at a time."""
    if sq * bytes_of_query <= SCRATCH_BYTES:
        return sq, min(batch, SCRATCH_BYTES // max(1, sq * bytes_of_query))
    return max(32, SCRATCH_BYTES // bytes_of_query // 32 * 32), 1


class Backward:
    """The backward of one call.

    Args:
        call: the call.
        attended: the results of the forward, including the rounding error `rest`.
        grad: the gradient of the output.
    """

    def __init__(self, call: Absorbed, attended: Attended, grad: Tensor) -> None:
        self.call, self.attended, self.grad = call, attended, contiguous_rows(grad)
        self.pads = padded(call.value), padded(call.rotary)
        self.tiles = tiles_of(call.heads, sum(self.pads), call.gpu())
        narrow = call.gpu().capability[0] == 9 and sum(self.pads) <= 128
        self.options = {"maxnreg": HOPPER_REGISTERS} if narrow else {}
        self.blocks = triton.cdiv(call.heads, self.tiles.heads)
        self.dq = torch.empty_like(call.query, memory_format=torch.contiguous_format)

    def gradients(self, *, repeatable: bool) -> tuple[Tensor, Tensor]:
        """The gradients of queries and keys, the latter summed in a fixed order or by atomics."""
        if not (self.dq.numel() and self.call.indices.numel()):
            return self.dq.zero_(), torch.zeros_like(self.call.key)
        return self.dq, self._ordered() if repeatable else self._by_atomics()

    def _by_atomics(self) -> Tensor:
        (batch, sq, _, _), key = self.call.sizes(), self.call.key
        dkv = key.new_zeros(key.shape, dtype=torch.float32)
        self._launch((0, batch), (0, sq), dkv, None, 0)
        return dkv.to(key.dtype)

    def _ordered(self) -> Tensor:
        (batch, sq, _, topk), key = self.call.sizes(), self.call.key
        width = key.size(3)
        queries, elements = parts(sq, batch, topk * self.blocks * width * key.element_size())
        whole = queries >= sq
        region = min(queries, sq) * topk
        room = key.new_empty(elements, region, self.blocks, width)
        dkv = key.new_zeros(key.shape, dtype=key.dtype if whole else torch.float32)
        for q0 in range(0, sq, queries):
            part = (q0, min(q0 + queries, sq))
            order = Order(self.call, part)
            for b0 in range(0, batch, elements):
                b1 = min(b0 + elements, batch)
                self._launch((b0, b1), part, room, order, region)
                order.add_up(room, b0, b1, region, dkv[:, b0:b1, 0], add=not whole)
        return dkv.to(key.dtype)

    def _launch(
        self,
        elements: tuple[int, int],
        queries: tuple[int, int],
        contributions: Tensor,
        order: Order | None,
        region: int,
    ) -> None:
        call, tiles, rows = self.call, self.tiles, queries[1] - queries[0]
        (batch, sq, sk, topk), atomic = call.sizes(), order is None
        _backward_kernel[((elements[1] - elements[0]) * rows, self.blocks)](
            call.query, call.key, call.indices, *call.bounds[:2], *call.bounds.strides,
            *self.attended, self.grad, self.dq,
            call.indices if order is None else order.bits,
            call.indices if order is None else order.first, contributions,
            call.softmax_scale, call.softmax_scale * LOG2_E, sq, sk, topk, batch,
            0 if order is None else order.words, elements[0], queries[0], rows, region,
            *call.strides(), *self.grad.stride()[:3],
            H=tiles.heads, V_PAD=self.pads[0], R_PAD=self.pads[1], KEYS=tiles.keys,
            ATOMIC=atomic, SPLIT=not atomic and call.query.dtype != torch.float32,
            **call.common(), num_warps=WARPS, num_stages=tiles.stages, **self.options,
        )  # fmt: skip
