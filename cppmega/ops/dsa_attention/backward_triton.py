"""The backward of DSA's absorbed sparse attention on CUDA.

Grid: (queries x batch, blocks of heads). A program holds the Q and dO of its heads, delta and the
accumulator of dQ `[V + R, BLOCK_H]` in fp32. It reads Q, dO, O, `rest` and the log-sum-exps once,
gathers its chosen keys again, BLOCK_N at a time, and computes, keys by heads,

    P^T = exp(K Q^T - lse)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
    dQ^T = K^T dS^T           dK = dS^T Q + [P^T dO | 0]

dQ is written once. dS enters its product as two terms in the input's type: the sum of dS over the
keys is zero, so where keys resemble one another, the product cancels to a value much smaller than
its terms.

dK is the contribution of one query to each of its keys. By default the contributions are
accumulated by fp32 atomics, four numbers at a time. In the deterministic mode each is written once,
in the type of the keys, and summed in a fixed order (see `order_triton`); P and dS then enter this
product as two terms as well, so that the rounding of the contributions is the only one.

The limits are registers (three programs fit on an SM of sm_90) and the traffic of the
contributions: atomics take over a quarter of the time on an H200. The deterministic mode writes and
reads the contributions once, at the rate of HBM (`benchmarks/results/dsa_attention_designs.md`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.device import contiguous_rows
from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.tiles_triton import LOG2_E, padded, product, rows_of
from cppmega.ops.dsa_attention.forward_triton import WARPS, tiles_of
from cppmega.ops.dsa_attention.order_triton import Order, bounds_of_row, place_of, visible
from cppmega.ops.dsa_attention.problem import Absorbed, Attended

HOPPER_REGISTERS = 168
"""Registers per thread with latent and rotary parts of 64: three programs fit on an SM of sm_90."""

SCRATCH_BYTES = 1 << 28
"""Maximum memory of the contributions held at a time, unless 32 queries need more."""


@triton.jit
def _contribute(rows, offs_d, x, mask_n, WIDTH: tl.constexpr, ATOMIC: tl.constexpr):
    """Add rows to the gradients of keys, or write them to their slots."""
    mask = mask_n[:, None] & (offs_d < WIDTH)[None, :]
    if ATOMIC:
        tl.atomic_add(rows[:, None] + offs_d[None, :], x, mask=mask, sem="relaxed")
    else:
        tl.store(rows[:, None] + offs_d[None, :], x.to(rows.dtype.element_ty), mask=mask)


@on_its_device
@triton.jit
def _backward_kernel(
    query, key, indices, starts, ends, bound_batch, bound_row, out, rest, lse, do_ptr, dq_ptr,
    bits, first, contributions, scale, log2_scale, sq, sk, topk, batch, words, b0, q0, part, region,
    q_row, q_batch, q_head, k_row, k_batch, g_row, g_batch, g_head,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    R: tl.constexpr, R_PAD: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    ATOMIC: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """dQ of one query and a block of heads, and its contributions to the gradients of its keys."""
    row_in_part = tl.program_id(0) % part
    b = (b0 + tl.program_id(0) // part).to(tl.int64)
    row = (q0 + row_in_part).to(tl.int64)
    start, end = bounds_of_row(starts, ends, b, row, sq, sk, bound_batch, bound_row, CAUSAL)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < HEADS
    offs_n, offs_v, offs_r = tl.arange(0, BLOCK_N), tl.arange(0, V_PAD), tl.arange(0, R_PAD)
    row_indices = indices + (b * sq + row) * topk
    key += b * k_batch
    q_ptr = query + row * q_row + b * q_batch
    offs_lse = (row * batch + b) * HEADS + offs_h
    q_latent = rows_of(q_ptr, offs_h, q_head, mask_h, V, V_PAD)
    if R > 0:
        q_rotary = rows_of(q_ptr + V, offs_h, q_head, mask_h, R, R_PAD)
        dq_rotary = tl.zeros([R_PAD, BLOCK_H], tl.float32)
    dq_latent = tl.zeros([V_PAD, BLOCK_H], tl.float32)
    do = rows_of(do_ptr + row * g_row + b * g_batch, offs_h, g_head, mask_h, V, V_PAD)
    lse_i = tl.load(lse + offs_lse, mask=mask_h, other=float("inf"))
    o = rows_of(out, offs_lse, V, mask_h, V, V_PAD).to(tl.float32)
    o += rows_of(rest, offs_lse, V, mask_h, V, V_PAD).to(tl.float32)
    delta = tl.sum(o * do.to(tl.float32), axis=1)
    for first_slot in range(0, topk, BLOCK_N):
        key_n = tl.load(
            row_indices + first_slot + offs_n, mask=first_slot + offs_n < topk, other=-1
        ).to(tl.int32)
        mask_n = visible(key_n, start, end)
        k_latent = rows_of(key, key_n, k_row, mask_n, V, V_PAD)
        s = tl.dot(k_latent, tl.trans(q_latent), input_precision="ieee")
        if R > 0:
            k_rotary = rows_of(key + V, key_n, k_row, mask_n, R, R_PAD)
            s = tl.dot(k_rotary, tl.trans(q_rotary), s, input_precision="ieee")
        p = tl.exp2(s * log2_scale - lse_i[None, :])
        p = tl.where(mask_n[:, None], p, 0.0)
        dp = tl.dot(k_latent, tl.trans(do), input_precision="ieee")
        ds = p * (dp - delta[None, :]) * scale
        high = ds.to(k_latent.dtype)
        low = (ds - high.to(tl.float32)).to(k_latent.dtype)
        dq_latent = tl.dot(tl.trans(k_latent), high, dq_latent, input_precision="ieee")
        dq_latent = tl.dot(tl.trans(k_latent), low, dq_latent, input_precision="ieee")
        if R > 0:
            dq_rotary = tl.dot(tl.trans(k_rotary), high, dq_rotary, input_precision="ieee")
            dq_rotary = tl.dot(tl.trans(k_rotary), low, dq_rotary, input_precision="ieee")
        if ATOMIC:
            contribution = contributions + (key_n.to(tl.int64) * batch + b) * (V + R)
        else:
            slot = place_of(bits, first, b, key_n, row_in_part, mask_n, sk, words).to(tl.int64)
            slot += (tl.program_id(0) // part).to(tl.int64) * region
            contribution = contributions + (slot * tl.num_programs(1) + tl.program_id(1)) * (V + R)
        zeros = tl.zeros([BLOCK_N, V_PAD], tl.float32)
        dk_latent = product(p, do, product(ds, q_latent, zeros, SPLIT), SPLIT)
        _contribute(contribution, offs_v, dk_latent, mask_n, V, ATOMIC)
        if R > 0:
            dk_rotary = product(ds, q_rotary, tl.zeros([BLOCK_N, R_PAD], tl.float32), SPLIT)
            _contribute(contribution + V, offs_r, dk_rotary, mask_n, R, ATOMIC)
    dq_ptrs = dq_ptr + offs_lse * (V + R)
    rounded_dq = dq_latent.to(dq_ptr.dtype.element_ty)
    tl.store(
        dq_ptrs[None, :] + offs_v[:, None], rounded_dq, mask=mask_h[None, :] & (offs_v < V)[:, None]
    )
    if R > 0:
        rounded_dq = dq_rotary.to(dq_ptr.dtype.element_ty)
        dq_ptrs += V
        tl.store(
            dq_ptrs[None, :] + offs_r[:, None],
            rounded_dq,
            mask=mask_h[None, :] & (offs_r < R)[:, None],
        )


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
            BLOCK_H=tiles.heads, V_PAD=self.pads[0], R_PAD=self.pads[1], BLOCK_N=tiles.keys,
            ATOMIC=atomic, SPLIT=not atomic and call.query.dtype != torch.float32,
            **call.common(), num_warps=WARPS, num_stages=tiles.stages, **self.options,
        )  # fmt: skip
