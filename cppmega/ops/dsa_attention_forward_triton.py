"""The forward of DSA's absorbed sparse attention on CUDA: one program per query and block of heads.

The latent key of a row is [latent | rotary], and its latent part is the value too. Products are
keys by heads, `S^T = K Q^T` and `O^T = V^T P^T`, since there are more chosen keys (64 and more)
than heads, and a tensor core's tile has 64 rows. Where all chosen keys fit into one block there is
no running maximum, and nothing is scaled again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.dsa_attention_order_triton import bounds_arguments, bounds_of_row, visible
from cppmega.ops.dsa_indexer_device import Gpu, gpu_of
from cppmega.ops.dsa_indexer_tiles_triton import padded

LOG2_E = 1.4426950408889634


class Tiles(NamedTuple):
    """How a program's work is cut.

    Attributes:
        keys: chosen keys of a block.
        heads: of a block.
        warps: of a program.
        stages: of the loop over blocks of keys.
        registers: most that a thread may have, so that more programs fit a multiprocessor.
    """

    keys: int
    heads: int
    warps: int
    stages: int = 1
    registers: int | None = None


def forward_tiles(heads: int, width: int, topk: int, gpu: Gpu) -> Tiles:
    """The tiles of the forward for queries of a padded width."""
    return Tiles(min(256, padded(topk)), min(32, padded(heads)), 8 if width > 64 else 4)


@triton.jit  # type: ignore[untyped-decorator]
def gathered(base, at, there, step, D: tl.constexpr, D_PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows `at` of a matrix, `[rows, D_PAD]`, zero where there is none."""
    d = tl.arange(0, D_PAD)
    return tl.load(
        base + at.to(tl.int64)[:, None] * step + d[None, :],
        mask=there[:, None] & (d < D)[None, :],
        other=0.0,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    query, key, indices, starts, ends, bound_batch, bound_row, out, rest, lse, scale, sq, sk, topk,
    batch, q_row, q_batch, q_head, k_row, k_batch,
    HEADS: tl.constexpr, H: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    R: tl.constexpr, R_PAD: tl.constexpr, KEYS: tl.constexpr, ONE: tl.constexpr,
    CAUSAL: tl.constexpr, REST: tl.constexpr,
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
    for first in range(0, KEYS if ONE else topk, KEYS):
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
        if ONE:
            total = tl.sum(p, axis=0)
            acc = tl.dot(tl.trans(latent), p.to(latent.dtype), input_precision="ieee")
        else:
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(p, axis=0)
            acc = tl.dot(
                tl.trans(latent), p.to(latent.dtype), acc * shrink[None, :], input_precision="ieee"
            )
        top = higher
    some = total > 0.0
    acc = acc * tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)[None, :]
    place = (s * batch + b) * HEADS + heads
    # An infinite log-sum-exp makes all probabilities of a row without keys zero.
    by_row = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("inf"))
    tl.store(lse + place, by_row, mask=heads < HEADS)
    v = tl.arange(0, V_PAD)
    into = place[None, :] * V + v[:, None]
    inside = (heads < HEADS)[None, :] & (v < V)[:, None]
    rounded = acc.to(out.dtype.element_ty)
    tl.store(out + into, rounded, mask=inside)
    if REST:
        tl.store(rest + into, (acc - rounded.to(tl.float32)).to(rest.dtype.element_ty), mask=inside)


class Attended(NamedTuple):
    """What the forward leaves for the backward.

    Attributes:
        out: `[sq, b, heads, v]`.
        rest: what its rounding took away, in the same type; None where the backward sums delta
            over the keys.
        lse: log-sum-exp of each row in base 2, `[sq, b, heads]`; +inf for a row without keys.
    """

    out: Tensor
    rest: Tensor | None
    lse: Tensor


def forward(
    query: Tensor,
    key: Tensor,
    value_width: int,
    indices: Tensor,
    softmax_scale: float,
    starts: Tensor | None,
    ends: Tensor | None,
    *,
    want_rest: bool,
    tiles: Tiles | None = None,
) -> Attended:
    """Attend; arguments as of `dsa_attention.sparse_attention`, indices contiguous."""
    sq, batch, heads, width = query.shape
    topk, rotary = indices.size(-1), width - value_width
    out = query.new_empty(sq, batch, heads, value_width)
    rest = torch.empty_like(out) if want_rest else None
    lse = out.new_empty(sq, batch, heads, dtype=torch.float32)
    tiles = tiles or forward_tiles(heads, padded(width), topk, gpu_of(query.device))
    if out.numel():
        _forward_kernel[(batch * sq, triton.cdiv(heads, tiles.heads))](
            query, key, indices, *bounds_arguments(starts, ends, indices),
            out, out if rest is None else rest, lse, softmax_scale * LOG2_E,
            sq, key.size(0), topk, batch, *query.stride()[:3], *key.stride()[:2],
            HEADS=heads, H=tiles.heads, V=value_width, V_PAD=padded(value_width),
            R=rotary, R_PAD=padded(rotary), KEYS=tiles.keys, ONE=topk <= tiles.keys,
            CAUSAL=starts is None, REST=want_rest, **launch_options(tiles),
        )  # fmt: skip
    return Attended(out, rest, lse)


def launch_options(tiles: Tiles) -> dict[str, Any]:
    """The options of a launch."""
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return options if tiles.registers is None else {**options, "maxnreg": tiles.registers}
