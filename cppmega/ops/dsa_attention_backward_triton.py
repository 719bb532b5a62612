"""The backward of DSA's absorbed sparse attention on CUDA: one program per query and head block.

A program gathers its chosen keys once more and forms, keys by heads,

    P^T = exp(K Q^T - lse)    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
    dQ^T = K^T dS^T           dK = dS^T Q + [P^T dO | 0]

delta, the sum of P dP over the keys, is summed in fp32 where all keys are in one block; otherwise
it is the product of dO with the output and with what rounding took from the output. dK is the
contribution of one query to each of its keys, see `dsa_attention_order_triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.dsa_attention_forward_triton import (
    LOG2_E,
    Attended,
    Tiles,
    gathered,
    launch_options,
)
from cppmega.ops.dsa_attention_order_triton import (
    Order,
    bounds_arguments,
    bounds_of_row,
    place_of,
    visible,
)
from cppmega.ops.dsa_indexer_device import Gpu, gpu_of
from cppmega.ops.dsa_indexer_sparse_triton import product
from cppmega.ops.dsa_indexer_tiles_triton import padded

SCRATCH_BYTES = 1 << 28
"""Most memory of the contributions that are held at a time, unless 32 queries take more."""


def backward_tiles(heads: int, width: int, topk: int, gpu: Gpu) -> Tiles:
    """The tiles of the backward for queries of a padded width."""
    return Tiles(min(256, padded(topk)), min(32, padded(heads)), 8)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    query, key, indices, starts, ends, bound_batch, bound_row, out, rest, lse, grad, dq,
    bits, first, contributions, scale, sq, sk, topk, batch, words, b0, q0, part, region,
    q_row, q_batch, q_head, k_row, k_batch, g_row, g_batch, g_head,
    HEADS: tl.constexpr, H: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    R: tl.constexpr, R_PAD: tl.constexpr, KEYS: tl.constexpr, ONE: tl.constexpr,
    CAUSAL: tl.constexpr, SPLIT: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    near = tl.program_id(0) % part
    b = (b0 + tl.program_id(0) // part).to(tl.int64)
    s = (q0 + near).to(tl.int64)
    start, end = bounds_of_row(starts, ends, b, s, sq, sk, bound_batch, bound_row, CAUSAL)
    heads = tl.program_id(1) * H + tl.arange(0, H)
    inside = heads < HEADS
    lane = tl.arange(0, KEYS)
    v, r = tl.arange(0, V_PAD), tl.arange(0, R_PAD)
    chosen = indices + (b * sq + s) * topk
    key += b * k_batch
    rows = query + s * q_row + b * q_batch
    place = (s * batch + b) * HEADS + heads
    q_latent = gathered(rows, heads, inside, q_head, V, V_PAD)
    if R > 0:
        q_rotary = gathered(rows + V, heads, inside, q_head, R, R_PAD)
    upstream = gathered(grad + s * g_row + b * g_batch, heads, inside, g_head, V, V_PAD)
    by_row = tl.load(lse + place, mask=inside, other=float("inf"))
    delta = tl.zeros([H], tl.float32)
    if not ONE:
        output = gathered(out, place, inside, V, V, V_PAD).to(tl.float32)
        output += gathered(rest, place, inside, V, V, V_PAD).to(tl.float32)
        delta = tl.sum(output * upstream.to(tl.float32), axis=1)
    if R > 0:
        sum_rotary = tl.zeros([R_PAD, H], tl.float32)
    sum_latent = tl.zeros([V_PAD, H], tl.float32)
    for block in range(0, KEYS if ONE else topk, KEYS):
        at = tl.load(chosen + block + lane, mask=block + lane < topk, other=-1).to(tl.int32)
        there = visible(at, start, end)
        latent = gathered(key, at, there, k_row, V, V_PAD)
        scores = tl.dot(latent, tl.trans(q_latent), input_precision="ieee")
        if R > 0:
            rotary = gathered(key + V, at, there, k_row, R, R_PAD)
            scores = tl.dot(rotary, tl.trans(q_rotary), scores, input_precision="ieee")
        p = tl.exp2(scores * (scale * 1.4426950408889634) - by_row[None, :])
        p = tl.where(there[:, None], p, 0.0)
        dp = tl.dot(latent, tl.trans(upstream), input_precision="ieee")
        if ONE:
            delta = tl.sum(p * dp, axis=0)
        ds = p * (dp - delta[None, :]) * scale
        rounded = ds.to(latent.dtype)
        sum_latent = tl.dot(tl.trans(latent), rounded, sum_latent, input_precision="ieee")
        if R > 0:
            sum_rotary = tl.dot(tl.trans(rotary), rounded, sum_rotary, input_precision="ieee")
        if ATOMIC:
            into = contributions + (b * sk + at.to(tl.int64)) * (V + R)
        else:
            pair = place_of(bits, first, b, at, near, there, sk, words).to(tl.int64)
            pair += (tl.program_id(0) // part).to(tl.int64) * region
            into = contributions + (pair * tl.num_programs(1) + tl.program_id(1)) * (V + R)
        none = tl.zeros([KEYS, V_PAD], tl.float32)
        d_latent = product(p, upstream, product(ds, q_latent, none, SPLIT), SPLIT)
        mask = there[:, None] & (v < V)[None, :]
        if ATOMIC:
            tl.atomic_add(into[:, None] + v[None, :], d_latent, mask=mask, sem="relaxed")
        else:
            d_latent = d_latent.to(contributions.dtype.element_ty)
            tl.store(into[:, None] + v[None, :], d_latent, mask=mask)
        if R > 0:
            d_rotary = product(ds, q_rotary, tl.zeros([KEYS, R_PAD], tl.float32), SPLIT)
            mask = there[:, None] & (r < R)[None, :]
            if ATOMIC:
                tl.atomic_add(into[:, None] + V + r[None, :], d_rotary, mask=mask, sem="relaxed")
            else:
                d_rotary = d_rotary.to(contributions.dtype.element_ty)
                tl.store(into[:, None] + V + r[None, :], d_rotary, mask=mask)
    into_dq = dq + place * (V + R)
    tl.store(
        into_dq[None, :] + v[:, None],
        sum_latent.to(dq.dtype.element_ty),
        mask=inside[None, :] & (v < V)[:, None],
    )
    if R > 0:
        tl.store(
                into_dq[None, :] + V + r[:, None],
            sum_rotary.to(dq.dtype.element_ty),
            mask=inside[None, :] & (r < R)[:, None],
        )


def wants_rest(query: Tensor, value_width: int, indices: Tensor) -> bool:
    """Whether the backward takes delta from the output, not from the keys."""
    topk = indices.size(-1)
    width = padded(query.size(3))
    return topk > backward_tiles(query.size(2), width, topk, gpu_of(query.device)).keys


def parts(sq: int, batch: int, bytes_of_query: int) -> tuple[int, int]:
    """How many queries of how many batch elements have their contributions held at a time."""
    if sq * bytes_of_query <= SCRATCH_BYTES:
        return sq, min(batch, SCRATCH_BYTES // max(1, sq * bytes_of_query))
    return max(32, SCRATCH_BYTES // bytes_of_query // 32 * 32), 1


def backward(
    query: Tensor,
    key: Tensor,
    value_width: int,
    indices: Tensor,
    softmax_scale: float,
    starts: Tensor | None,
    ends: Tensor | None,
    attended: Attended,
    grad: Tensor,
    *,
    tiles: Tiles | None = None,
    split: bool = True,
    atomic: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of queries and keys; arguments as of `forward`, and the output's gradient."""
    sq, batch, heads, width = query.shape
    topk, sk = indices.size(-1), key.size(0)
    tiles = tiles or backward_tiles(heads, padded(width), topk, gpu_of(query.device))
    blocks = triton.cdiv(heads, tiles.heads)
    dq = query.new_empty(query.shape)
    dtype = dtype or key.dtype
    queries, elements = parts(sq, batch, topk * blocks * width * dtype.itemsize)
    whole = queries >= sq and not atomic
    dkv = key.new_empty(key.shape) if whole else key.new_zeros(key.shape, dtype=torch.float32)
    if not query.numel():
        return dq, dkv.zero_().to(key.dtype)
    room = key.new_empty(elements, min(queries, sq) * topk, blocks, width, dtype=dtype)
    if atomic:
        queries, elements, room = sq, batch, key.new_zeros(batch, sk, width, dtype=torch.float32)
    rest, grad = attended.rest, grad if grad.stride(-1) == 1 else grad.contiguous()

    def launch(b0: int, b1: int, q0: int, q1: int, order: Order | None) -> None:
        _backward_kernel[((b1 - b0) * (q1 - q0), blocks)](
            query, key, indices, *bounds_arguments(starts, ends, indices),
            attended.out, attended.out if rest is None else rest, attended.lse, grad, dq,
            order.bits if order else indices, order.first if order else indices, room,
            softmax_scale, sq, sk, topk, batch, order.words if order else 0, b0, q0, q1 - q0,
            room.size(1), *query.stride()[:3], *key.stride()[:2], *grad.stride()[:3],
            HEADS=heads, H=tiles.heads, V=value_width, V_PAD=padded(value_width),
            R=width - value_width, R_PAD=padded(width - value_width), KEYS=tiles.keys,
            ONE=topk <= tiles.keys, CAUSAL=starts is None, SPLIT=split, ATOMIC=atomic,
            **launch_options(tiles),
        )  # fmt: skip

    if atomic:
        launch(0, batch, 0, sq, None)
        return dq, room.transpose(0, 1).unsqueeze(2).to(key.dtype)
    for q0 in range(0, sq, queries):
        q1 = min(q0 + queries, sq)
        order = Order(indices, starts, ends, sk, (q0, q1))
        for b0 in range(0, batch, elements):
            b1 = min(b0 + elements, batch)
            launch(b0, b1, q0, q1, order)
            order.add_up(room, b0, b1, room.size(1), dkv[:, b0:b1, 0], add=not whole)
    return dq, dkv.to(key.dtype)
