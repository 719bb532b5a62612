"""The forward of DSA's absorbed sparse attention on CUDA: one program per query and block of heads.

A latent key is [latent | rotary], and its latent part is also the value. Products are keys by
heads, `S^T = K Q^T` and `O^T = V^T P^T`: a tensor core's tile has 64 rows, which the chosen keys
fill but the heads of a rank often do not. A program gathers its keys in blocks, prefetching the
next block while it processes the current one, and keeps a running maximum.

If gradients are needed, P enters its product as two terms in the input's type, and the rounding
error of the output is kept as `rest`. Delta, which the backward subtracts, is the product of the
output and its gradient; where one score is far above the others, dS is a small difference of large
numbers, and the error of a delta computed from the rounded output would dominate it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from cppmega.ops.common.device import Gpu
from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.tiles_triton import LOG2_E, padded
from cppmega.ops.dsa_attention.order_triton import bounds_of_row, visible
from cppmega.ops.dsa_attention.problem import Absorbed, Attended

WARPS = 4
"""Warps of a program in forward and backward: one warp group computes the rows of a product."""


class Tiles(NamedTuple):
    """The tile sizes of a program.

    Attributes:
        keys: chosen keys per block.
        heads: heads per program.
        stages: blocks of keys in flight or being processed.
    """

    keys: int
    heads: int
    stages: int


def tiles_of(heads: int, width: int, gpu: Gpu) -> Tiles:
    """The tiles of forward and backward; `width` is the padded latent and rotary width."""
    if width > 128 and gpu.capability[0] != 9:
        return Tiles(32, min(16, padded(heads)), 1)
    # Without a prefetched stage, Triton 3.6 compiles products for sm_90 that read beyond the shared
    # memory of a block.
    return Tiles(64, min(32, padded(heads)), 2)


@triton.jit  # type: ignore[untyped-decorator]
def gathered(base, at, there, step, D: tl.constexpr, D_PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows `at` of a matrix, `[rows, D_PAD]`, zero where `there` is false."""
    d = tl.arange(0, D_PAD)
    return tl.load(
        base + at.to(tl.int64)[:, None] * step + d[None, :],
        mask=there[:, None] & (d < D)[None, :],
        other=0.0,
    )


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    query, key, indices, starts, ends, bound_batch, bound_row, out, rest, lse, scale, sq, sk, topk,
    batch, q_row, q_batch, q_head, k_row, k_batch,
    HEADS: tl.constexpr, H: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    R: tl.constexpr, R_PAD: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // sq).to(tl.int64)
    s = (tl.program_id(0) % sq).to(tl.int64)
    start, end = bounds_of_row(starts, ends, b, s, sq, sk, bound_batch, bound_row, CAUSAL)
    heads = tl.program_id(1) * H + tl.arange(0, H)
    lane = tl.arange(0, KEYS)
    chosen = indices + (b * sq + s) * topk
    key += b * k_batch
    rows = query + s * q_row + b * q_batch
    q_latent = gathered(rows, heads, heads < HEADS, q_head, V, V_PAD)
    if R > 0:
        q_rotary = gathered(rows + V, heads, heads < HEADS, q_head, R, R_PAD)
    top = tl.full([H], -3.0e38, tl.float32)
    total = tl.zeros([H], tl.float32)
    acc = tl.zeros([V_PAD, H], tl.float32)
    for first in range(0, topk, KEYS):
        at = tl.load(chosen + first + lane, mask=first + lane < topk, other=-1).to(tl.int32)
        there = visible(at, start, end)
        latent = gathered(key, at, there, k_row, V, V_PAD)
        scores = tl.dot(latent, tl.trans(q_latent), input_precision="ieee")
        if R > 0:
            rotary = gathered(key + V, at, there, k_row, R, R_PAD)
            scores = tl.dot(rotary, tl.trans(q_rotary), scores, input_precision="ieee")
        scores = tl.where(there[:, None], scores * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=0))
        p = tl.exp2(scores - higher[None, :])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, axis=0)
        high = p.to(latent.dtype)
        acc = tl.dot(tl.trans(latent), high, acc * shrink[None, :], input_precision="ieee")
        if REST:
            low = (p - high.to(tl.float32)).to(latent.dtype)
            acc = tl.dot(tl.trans(latent), low, acc, input_precision="ieee")
        top = higher
    some = total > 0.0
    acc = acc * tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)[None, :]
    place = (s * batch + b) * HEADS + heads
    # An infinite log-sum-exp makes all probabilities zero in a row without keys.
    by_row = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("inf"))
    tl.store(lse + place, by_row, mask=heads < HEADS)
    v = tl.arange(0, V_PAD)
    into = place[None, :] * V + v[:, None]
    inside = (heads < HEADS)[None, :] & (v < V)[:, None]
    rounded = acc.to(out.dtype.element_ty)
    tl.store(out + into, rounded, mask=inside)
    if REST:
        tl.store(rest + into, (acc - rounded.to(tl.float32)).to(rest.dtype.element_ty), mask=inside)


def forward(call: Absorbed, *, want_rest: bool) -> Attended:
    """Compute the attention over the chosen keys."""
    (batch, sq, sk, topk), attended = call.sizes(), Attended.empty(call, want_rest=want_rest)
    out, rest, lse = attended
    pads = padded(call.value), padded(call.rotary)
    tiles = tiles_of(call.heads, sum(pads), call.gpu())
    if out.numel():
        _forward_kernel[(batch * sq, triton.cdiv(call.heads, tiles.heads))](
            call.query, call.key, call.indices, *call.bounds[:2], *call.bounds.strides,
            out, out if rest is None else rest, lse, call.softmax_scale * LOG2_E,
            sq, sk, topk, batch, *call.strides(), H=tiles.heads, V_PAD=pads[0], R_PAD=pads[1],
            KEYS=tiles.keys, REST=want_rest, **call.common(),
            num_warps=WARPS, num_stages=tiles.stages,
        )  # fmt: skip
    return attended
