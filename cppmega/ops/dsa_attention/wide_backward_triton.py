"""The backward of DSA's absorbed sparse attention for wide latents (576/512) on CUDA.

A single kernel for the gradients of a query and of the keys that it chose would need 290 KiB of
accumulators, but a multiprocessor has 256. So three kernels divide the work, for as many queries at
a time as the scratch memory of P and dS holds. All gather or scatter the chosen keys of one query:

- `_scores_kernel`: grid queries x batch x blocks of heads. A program holds the Q and dO of its
  heads, reads out, `rest` and the log-sum-exps once for delta, gathers each key once, and writes dS
  and P `[2, heads, topk]` once, in the type of the inputs, as products need them.
- `_query_kernel`: grid queries x batch x blocks of heads x blocks of columns. A program holds the
  accumulator of its columns of dQ = dS K. It reads the dS of its heads once, gathers its columns of
  each key once, and writes dQ once.
- `_key_kernel`: grid queries x batch x blocks of columns. A program holds its columns of [Q ; dO],
  reads dS and P once, and computes [dS | P]^T [Q ; dO], one product over all heads: the
  contribution of a query to the gradient of each key it chose. This is added to dKV by fp32
  atomics, or written once, in fp32, and summed in a fixed order (see `order_triton`).

Registers and shared memory limit the tiles, and hence how often dS and P are read again: once per
block of columns. In a fixed order, the contributions also go through HBM.
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


@triton.jit
def _rows_of_keys(k_ptr, key_n, k_row, V: tl.constexpr, R: tl.constexpr):
    """The first columns of some keys and, if there are any, their remaining ones; 0 where -1."""
    mask_n = (key_n >= 0)[:, None]
    ptrs = k_ptr + key_n.to(tl.int64)[:, None] * k_row
    k_latent = tl.load(ptrs + tl.arange(0, V)[None, :], mask=mask_n, other=0.0)
    k_rotary = k_latent
    if R > 0:
        k_rotary = tl.load(ptrs + V + tl.arange(0, R)[None, :], mask=mask_n, other=0.0)
    return k_latent, k_rotary


@on_its_device
@triton.jit
def _scores_kernel(
    query, key, indices, starts, ends, out, rest, lse, do_ptr, ds_p,
    scale, log_scale, batch, sq, sk, topk, slots, q0,
    q_row, q_batch, q_head, k_row, k_batch, g_row, g_batch, g_head, bound_batch, bound_row,
    HEADS: tl.constexpr, H_PAD: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """dS and P of a query and a block of heads.

    With AHEAD, the next block of keys is held in registers, since shared memory has no room.
    """
    part_row = (tl.program_id(0) // (H_PAD // BLOCK_H)).to(tl.int64)
    b, row = part_row % batch, q0 + part_row // batch
    start, end = bounds_of_row(starts, ends, b, row, sq, sk, bound_batch, bound_row, CAUSAL)
    offs_h = tl.program_id(0) % (H_PAD // BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = (offs_h < HEADS)[:, None]
    offs_n = tl.arange(0, BLOCK_N)
    offs_v = tl.arange(0, V)
    do_ptrs = do_ptr + b * g_batch + row * g_row + offs_h[:, None] * g_head + offs_v[None, :]
    base_o = (row * batch + b) * (HEADS * V)
    offs_o = offs_h[:, None] * V + offs_v[None, :]
    do = tl.load(do_ptrs, mask=mask_h, other=0.0)
    o = tl.load(out + base_o + offs_o, mask=mask_h, other=0.0).to(tl.float32)
    o += tl.load(rest + base_o + offs_o, mask=mask_h, other=0.0).to(tl.float32)
    delta = tl.sum(o * do.to(tl.float32), axis=1)
    q_ptrs = query + b * q_batch + row * q_row + offs_h[:, None] * q_head
    q_latent = tl.load(q_ptrs + offs_v[None, :], mask=mask_h, other=0.0)
    if R > 0:
        offs_r = V + tl.arange(0, R)
        q_rotary = tl.load(q_ptrs + offs_r[None, :], mask=mask_h, other=0.0)
    bs = b * sq + row
    lse_i = tl.load(
        lse + (row * batch + b) * HEADS + offs_h, mask=offs_h < HEADS, other=float("inf")
    )
    key += b * k_batch
    indices += bs * topk
    ds_ptrs = ds_p + (part_row * 2 * H_PAD + offs_h)[:, None] * slots + offs_n[None, :]
    key_n = chosen_keys(indices, offs_n, topk, start, end)
    if AHEAD:
        k_latent, k_rotary = _rows_of_keys(key, key_n, k_row, V, R)
    for first in range(0, slots_in_use(indices, topk, start, end), BLOCK_N):
        next_key_n = chosen_keys(indices, first + BLOCK_N + offs_n, topk, start, end)
        if not AHEAD:
            k_latent, k_rotary = _rows_of_keys(key, key_n, k_row, V, R)
        s = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee") * log_scale
        if R > 0:
            # Scaled separately, as in the forward, so that warps share both products' columns.
            s += tl.dot(q_rotary, tl.trans(k_rotary), input_precision="ieee") * log_scale
        if AHEAD:
            next_k_latent, k_rotary = _rows_of_keys(key, next_key_n, k_row, V, R)
        dp = tl.dot(do, tl.trans(k_latent), input_precision="ieee")
        p = tl.exp2(tl.where((key_n >= 0)[None, :], s - lse_i[:, None], float("-inf")))
        ds = p * ((dp - delta[:, None]) * scale)
        tl.store(ds_ptrs + first, ds.to(ds_p.dtype.element_ty))
        tl.store(ds_ptrs + H_PAD * slots + first, p.to(ds_p.dtype.element_ty))
        key_n = next_key_n
        if AHEAD:
            k_latent = next_k_latent


@on_its_device
@triton.jit
def _query_kernel(
    key, indices, starts, ends, ds_p, dq, batch, sq, sk, topk, slots, q0,
    k_row, k_batch, bound_batch, bound_row,
    HEADS: tl.constexpr, H_PAD: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
    FIRST: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Some columns of dQ of a query and a block of heads."""
    offs_d = FIRST + tl.program_id(0) % PARTS * BLOCK_D + tl.arange(0, BLOCK_D)
    block = tl.program_id(0) // PARTS
    part_row = (block // (H_PAD // BLOCK_H)).to(tl.int64)
    b, row = part_row % batch, q0 + part_row // batch
    start, end = bounds_of_row(starts, ends, b, row, sq, sk, bound_batch, bound_row, CAUSAL)
    offs_h = block % (H_PAD // BLOCK_H) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_n = tl.arange(0, BLOCK_N)
    key += b * k_batch
    indices += (b * sq + row) * topk
    ds_ptrs = ds_p + (part_row * 2 * H_PAD + offs_h)[:, None] * slots + offs_n[None, :]
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    key_n = chosen_keys(indices, offs_n, topk, start, end)
    for first in range(0, slots_in_use(indices, topk, start, end), BLOCK_N):
        k_ptrs = key + key_n.to(tl.int64)[:, None] * k_row + offs_d[None, :]
        k = tl.load(k_ptrs, mask=(key_n >= 0)[:, None], other=0.0)
        acc = tl.dot(tl.load(ds_ptrs + first), k, acc, input_precision="ieee")
        key_n = chosen_keys(indices, first + BLOCK_N + offs_n, topk, start, end)
    offs_dq = ((row * batch + b) * HEADS + offs_h)[:, None] * (V + R) + offs_d[None, :]
    tl.store(dq + offs_dq, acc.to(dq.dtype.element_ty), mask=(offs_h < HEADS)[:, None])


@on_its_device
@triton.jit
def _key_kernel(
    query, indices, starts, ends, do_ptr, ds_p, bits, of_word, words, region, dkv_ptr,
    batch, sq, sk, topk, slots, q0,
    q_row, q_batch, q_head, g_row, g_batch, g_head, bound_batch, bound_row,
    HEADS: tl.constexpr, H_PAD: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr,
    CAUSAL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Some columns of the contributions of a query to the gradients of its keys."""
    offs_d = FIRST + tl.program_id(0) % PARTS * BLOCK_D + tl.arange(0, BLOCK_D)
    part_row = (tl.program_id(0) // PARTS).to(tl.int64)
    b, row = part_row % batch, q0 + part_row // batch
    start, end = bounds_of_row(starts, ends, b, row, sq, sk, bound_batch, bound_row, CAUSAL)
    # Queries, then upstream gradients, form the rows of one matrix; values have no rotary columns.
    OPERANDS: tl.constexpr = 2 if FIRST < V else 1
    offs_qdo = tl.arange(0, OPERANDS * H_PAD)
    offs_h = offs_qdo % H_PAD
    mask_h = (offs_h < HEADS)[:, None]
    is_q = (offs_qdo < H_PAD)[:, None]
    q_ptrs = query + b * q_batch + row * q_row + offs_h[:, None] * q_head + offs_d[None, :]
    q_do = tl.load(q_ptrs, mask=mask_h & is_q, other=0.0)
    if OPERANDS == 2:
        do_ptrs = do_ptr + b * g_batch + row * g_row + offs_h[:, None] * g_head + offs_d[None, :]
        do = tl.load(do_ptrs, mask=mask_h & (offs_qdo >= H_PAD)[:, None], other=0.0)
        q_do = tl.where(is_q, q_do, do)
    offs_n = tl.arange(0, BLOCK_N)
    bs = b * sq + row
    indices += bs * topk
    ds_p_ptrs = ds_p + (part_row * 2 * H_PAD + offs_qdo)[:, None] * slots + offs_n[None, :]
    for first in range(0, slots_in_use(indices, topk, start, end), BLOCK_N):
        slot = first + offs_n
        key_n = chosen_keys(indices, slot, topk, start, end)
        dkv = tl.dot(tl.trans(tl.load(ds_p_ptrs + first)), q_do, input_precision="ieee")
        if ADD:
            dkv_ptrs = dkv_ptr + (b * sk + key_n)[:, None] * (V + R) + offs_d[None, :]
            tl.atomic_add(dkv_ptrs, dkv, mask=(key_n >= 0)[:, None], sem="relaxed")
        else:
            pair = place_of(bits, of_word, b, key_n, (row - q0).to(tl.int32), key_n >= 0, sk, words)
            dkv_ptrs = dkv_ptr + (b * region + pair)[:, None] * (V + R) + offs_d[None, :]
            tl.store(dkv_ptrs, dkv.to(dkv_ptr.dtype.element_ty), mask=(key_n >= 0)[:, None])


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
        ds_p = call.query.new_empty(part[1] - part[0], batch, 2, padded, slots)
        starts, ends, bound_strides, _ = call.bounds
        tile, scale = wide_tiles(call).scores, call.softmax_scale
        if ds_p.numel():
            _scores_kernel[(ds_p.size(0) * batch * padded // tile.heads,)](
                call.query, call.key, call.indices, starts, ends, *self.attended,
                grad, ds_p, scale, scale * LOG2_E, *call.sizes(), slots, part[0],
                *call.strides(), *grad.stride()[:3], *bound_strides,
                H_PAD=padded, BLOCK_H=tile.heads, BLOCK_N=tile.keys, AHEAD=tile.stages == 1,
                num_warps=tile.warps, num_stages=tile.stages, **call.common(),
            )  # fmt: skip
        return ds_p

    def gradient_of_queries(self, part: tuple[int, int], ds_p: Tensor, dq: Tensor) -> None:
        """Write the rows of one part of dq `[sq, b, heads, d]`."""
        call, tile = self.call, wide_tiles(self.call).queries
        starts, ends, bound_strides, _ = call.bounds
        blocks = ds_p.size(0) * ds_p.size(1) * max(1, ds_p.size(3) // tile.heads)
        for first, width in ((0, call.value), (call.value, call.rotary)):
            columns = min(tile.columns, width)
            if columns and ds_p.numel():
                _query_kernel[(blocks * (width // columns),)](
                    call.key, call.indices, starts, ends, ds_p, dq, *call.sizes(),
                    ds_p.size(4), part[0], *call.key.stride()[:2], *bound_strides,
                    H_PAD=ds_p.size(3), BLOCK_H=min(tile.heads, ds_p.size(3)), BLOCK_N=tile.keys,
                    BLOCK_D=columns, PARTS=width // columns, FIRST=first,
                    num_warps=tile.warps, num_stages=tile.stages, **call.common(),
                )  # fmt: skip

    def gradient_of_keys(
        self, part: tuple[int, int], ds_p: Tensor, into: Tensor, order: Order | None = None
    ) -> None:
        """Add one part to dkv, or write the contribution of each pair to its own slot.

        Args:
            part: first query, and the query after the last.
            ds_p: its dS and P, as returned by `scores`.
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
            if columns and ds_p.numel():
                _key_kernel[(ds_p.size(0) * ds_p.size(1) * (width // columns),)](
                    call.query, call.indices, starts, ends, grad, ds_p, *places, into,
                    *call.sizes(), ds_p.size(4), part[0],
                    *call.query.stride()[:3], *grad.stride()[:3], *bound_strides,
                    H_PAD=ds_p.size(3), BLOCK_N=tile.keys,
                    BLOCK_D=columns, PARTS=width // columns, FIRST=first, ADD=order is None,
                    num_warps=tile.warps, num_stages=tile.stages, **call.common(),
                )  # fmt: skip

    def gradients(self, *, repeatable: bool) -> tuple[Tensor, Tensor]:
        """The gradients of queries and keys, the latter summed in a fixed order or by atomics."""
        call = self.call
        batch, _, sk, topk = call.sizes()
        dq = torch.empty_like(call.query, memory_format=torch.contiguous_format)
        dkv = call.key.new_zeros(batch, sk, call.key.size(3), dtype=torch.float32)
        for part in self.parts(ordered=repeatable):
            ds_p = self.scores(part)
            self.gradient_of_queries(part, ds_p, dq)
            if not repeatable:
                self.gradient_of_keys(part, ds_p, dkv)
                continue
            order = Order(call, part)
            region = (part[1] - part[0]) * topk
            shares = dkv.new_empty(batch, region, 1, dkv.size(2))
            self.gradient_of_keys(part, ds_p, shares, order)
            order.add_up(shares, 0, batch, region, dkv.transpose(0, 1), add=True)
        return dq, dkv.transpose(0, 1).unsqueeze(2).to(call.key.dtype)
