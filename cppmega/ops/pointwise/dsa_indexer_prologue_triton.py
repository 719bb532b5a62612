"""Rotary embedding, Hadamard transform and scaled head weights of DSA's indexer in one kernel.

A row is one head of one token. Grid: tiles of rows of q, then those of k, then those of the
weights. A program holds one tile of about 1,024 elements in the registers of one warp, and reads
and writes each element once. The two columns of a pair are a power of two apart, as in the Hadamard
transform, so pairs are exchanged like its butterflies. The gradient is the transpose: the transform
first, then the inverse rotation.

On an H200 it takes about twice the time of its reads and writes; below 4096 x 8 tokens the launches
take longer than the kernel (`benchmarks/results/dsa_indexer_designs.md`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.device import contiguous_rows
from cppmega.ops.common.launch import on_its_device
from cppmega.ops.pointwise.hadamard_triton import butterflies

if TYPE_CHECKING:
    from cppmega.ops.pointwise.dsa_indexer_prologue import Inputs, Rotary

ELEMENTS = 1024
"""Elements of a tile, which belongs to one warp, so that exchanges need no barrier."""


@triton.jit
def _position(
    token, bounds, documents, steps, length, rank, RANKS: tl.constexpr, PACKED: tl.constexpr
):
    """The row of the angles that each token uses."""
    if PACKED:
        # The last document that begins at or before the token.
        low = tl.zeros(token.shape, tl.int32)
        high = low + documents
        for _ in range(steps):
            middle = (low + high) // 2
            before = tl.load(bounds + middle).to(tl.int32) // RANKS <= token
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        begin = tl.load(bounds + low).to(tl.int32)
        near = token - begin // RANKS
        if RANKS > 1:
            rows = (tl.load(bounds + low + 1).to(tl.int32) - begin) // RANKS
            half = rows // 2
            back = RANKS * rows - (rank + 1) * half + near - half
            near = tl.where(near < half, rank * half + near, back)
        token = near + tl.where(tl.load(bounds + documents) == length, begin, 0)
        token = tl.minimum(tl.maximum(token, 0), length - 1)
    return token


@triton.jit
def _exchanged(x, ROWS: tl.constexpr, D: tl.constexpr, APART: tl.constexpr):
    """Move column c to column c ^ APART, where APART is a power of two."""
    pairs = tl.reshape(x, (ROWS, D // (2 * APART), 2, APART))
    low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(high, low), (0, 1, 3, 2)), (ROWS, D))


@triton.jit
def _transposed(x, ROWS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Transpose each group of M * N columns as a matrix `[M, N]`."""
    matrices = tl.reshape(x, (ROWS, D // (M * N), M, N))
    return tl.reshape(tl.permute(matrices, (0, 1, 3, 2)), (ROWS, D))


@triton.jit
def _turn_rows(
    x, out, cos, sin, bounds, tile, tokens, batch, step, step_batch, step_head, documents, steps,
    length, rank, mscale, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr,
    PACKED: tl.constexpr, GATHERED: tl.constexpr, ADJACENT: tl.constexpr, STAGES: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    row = tile * ROWS + tl.arange(0, ROWS)
    pair, head = row // HEADS, row % HEADS
    token, b = pair // batch, pair % batch
    mask_row = token < tokens
    d = tl.arange(0, D_PAD)
    angle = d - FIRST
    turned = (angle >= 0) & (angle < WIDTH)
    APART: tl.constexpr = 1 if ADJACENT else WIDTH // 2
    near = _position(token, bounds, documents, steps, length, rank, RANKS, PACKED)
    offs_a = near.to(tl.int64)[:, None] * WIDTH + angle[None, :]
    mask_a = mask_row[:, None] & turned[None, :]
    c = tl.where(turned[None, :], tl.load(cos + offs_a, mask=mask_a, other=0.0) * mscale, 1.0)
    s = (
        tl.load(sin + offs_a, mask=mask_a, other=0.0)
        * tl.where((angle & APART) != 0, mscale, -mscale)[None, :]
    )
    offs_in = token.to(tl.int64) * step + b.to(tl.int64) * step_batch
    offs_in += head.to(tl.int64) * step_head
    offs_out = row.to(tl.int64)[:, None] * D
    mask = mask_row[:, None] & (d < D)[None, :]
    scale: tl.constexpr = D**-0.5
    y = tl.load(x + offs_in[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        if STAGES:
            y = butterflies(y, ROWS, D_PAD, STAGES) * scale
        y = y * c + _exchanged(y * s, ROWS, D_PAD, APART)
        if GATHERED:
            y = tl.where(turned[None, :], _transposed(y, ROWS, D_PAD, 2, WIDTH // 2), y)
    else:
        if GATHERED:
            y = tl.where(turned[None, :], _transposed(y, ROWS, D_PAD, WIDTH // 2, 2), y)
        y = y * c + _exchanged(y, ROWS, D_PAD, APART) * s
        if STAGES:
            y = butterflies(y, ROWS, D_PAD, STAGES) * scale
    tl.store(out + offs_out + d[None, :], y.to(out.dtype.element_ty), mask=mask)


@on_its_device
@triton.jit
def _prologue_kernel(
    q, k, weights, out_q, out_k, out_w, cos, sin, bounds_q, bounds_k, scale, mscale, tokens, batch,
    tiles_q, tiles_k, q_row, q_batch, q_head, k_row, k_batch, w_row, w_batch, w_head,
    documents_q, documents_k, steps_q, steps_k, length, rank, HEADS: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, FIRST: tl.constexpr,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, PACKED: tl.constexpr, GATHERED: tl.constexpr,
    ADJACENT: tl.constexpr, STAGES: tl.constexpr, BACKWARD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Process one tile of q, of k or of the weights."""
    tile = tl.program_id(0)
    if tile < tiles_q:
        _turn_rows(
            q, out_q, cos, sin, bounds_q, tile, tokens, batch, q_row, q_batch, q_head, documents_q,
            steps_q, length, rank, mscale, HEADS, ROWS, D, D_PAD, FIRST, WIDTH, RANKS, PACKED,
            GATHERED, ADJACENT, STAGES, BACKWARD,
        )  # fmt: skip
    elif tile < tiles_q + tiles_k:
        _turn_rows(
            k, out_k, cos, sin, bounds_k, tile - tiles_q, tokens, batch, k_row, k_batch, 0,
            documents_k, steps_k, length, rank, mscale, 1, ROWS, D, D_PAD, FIRST, WIDTH, RANKS,
            PACKED, GATHERED, ADJACENT, STAGES, BACKWARD,
        )  # fmt: skip
    else:
        offs_out = (tile - tiles_q - tiles_k) * TILE + tl.arange(0, TILE)
        pair, head = offs_out // HEADS, (offs_out % HEADS).to(tl.int64)
        token, b = pair // batch, (pair % batch).to(tl.int64)
        mask = token < tokens
        offs_in = token.to(tl.int64) * w_row + b * w_batch + head * w_head
        w = tl.load(weights + offs_in, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_w + offs_out, (w * scale).to(out_w.dtype.element_ty), mask=mask)


def turn(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    rotary: Rotary,
    hadamard: bool,
    scale: float,
    *,
    backward: bool,
) -> Inputs:
    """Compute q, k and weights or, with `backward`, their gradients from those of the results."""
    q, k = contiguous_rows(q), contiguous_rows(k)
    out = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, weights))
    tokens, batch, heads, d = q.shape
    wide = triton.next_power_of_2(d)
    rows = max(1, ELEMENTS // wide)
    tiles = [triton.cdiv(tokens * batch * many, rows) for many in (heads, 1)]
    tiles.append(triton.cdiv(tokens * batch * heads, ELEMENTS))
    if not q.numel():
        return (out[0], out[1], out[2])
    angles = rotary.angles.contiguous().float()
    documents = [x.contiguous() for x in rotary.documents or (angles, angles)]
    counts = [len(x) - 1 for x in documents]
    _prologue_kernel[(sum(tiles),)](
        q, k, weights, *out, angles.cos(), angles.sin(), *documents, scale,
        rotary.mscale, tokens, batch, *tiles[:2], *q.stride()[:3], *k.stride()[:2],
        *weights.stride(), *counts, *((count - 1).bit_length() for count in counts),
        len(angles), rotary.ranks[1], HEADS=heads, ROWS=rows, D=d, D_PAD=wide,
        FIRST=rotary.first, WIDTH=angles.size(-1), RANKS=rotary.ranks[0],
        PACKED=rotary.documents is not None, GATHERED=rotary.gathered, ADJACENT=rotary.adjacent,
        STAGES=d.bit_length() - 1 if hadamard else 0, BACKWARD=backward, TILE=ELEMENTS,
        num_warps=1,
    )  # fmt: skip
    return (out[0], out[1], out[2])
