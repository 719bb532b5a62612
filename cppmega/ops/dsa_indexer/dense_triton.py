"""The indexer's dense loss on CUDA: both distributions over all valid keys.

The log-sum-exp of the attention scores by head is computed first, in one pass over their products.
Then, a tile of queries and keys at a time: the target (the probabilities of all heads, summed in
registers), the index scores, the row losses and G = p - t, which `dsa_indexer_tiles_triton` turns
into gradients.

The sum of a target over the keys is the number of heads, so normalization needs no separate pass.
Under tensor parallelism the target of some queries at a time is written, summed over the ranks and
read back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.bits_triton import chosen
from cppmega.ops.common.bounds import strides_of
from cppmega.ops.common.device import contiguous_rows
from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.tiles_triton import LOG2_E, extent, padded, row_bounds, rows_of
from cppmega.ops.dsa_indexer.naive import EPSILON
from cppmega.ops.dsa_indexer.sparse_triton import kl_terms
from cppmega.ops.dsa_indexer.tiles_triton import IndexTiles

BLOCK = 64
"""Queries and keys of a tile of the target."""

LSE_KEYS = 128
"""Keys per step of the log-sum-exp of the attention scores."""

LSE_LAUNCH: dict[str, Any] = {"num_warps": 8, "num_stages": 2, "maxnreg": 128}
TILE_LAUNCH: dict[str, Any] = {"num_warps": 4, "num_stages": 3}


@triton.jit  # type: ignore[untyped-decorator]
def _wide_product(  # type: ignore[no-untyped-def]
    left, left_row, left_step, left_in, right, right_row, right_step, right_in,
    D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """left @ right.T for rows too wide for shared memory, a part of the width at a time."""
    s = tl.zeros([left_row.shape[0], right_row.shape[0]], tl.float32)
    for at in range(0, D, STEP):
        d = at + tl.arange(0, STEP)
        a = tl.load(
            left + left_row.to(tl.int64)[:, None] * left_step + d[None, :],
            mask=left_in[:, None] & (d < D)[None, :],
            other=0.0,
        )
        b = tl.load(
            right + right_row.to(tl.int64)[:, None] * right_step + d[None, :],
            mask=right_in[:, None] & (d < D)[None, :],
            other=0.0,
        )
        s = tl.dot(a, tl.trans(b), s, input_precision="ieee")
    return s


@triton.jit  # type: ignore[untyped-decorator]
def _attention_scores(  # type: ignore[no-untyped-def]
    query, queries, row, q_row, sq, key, at, k_row, sk,
    D: tl.constexpr, D_PAD: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Products of a block of queries with the keys starting at `at`."""
    lane = at + tl.arange(0, KEYS)
    if WIDE:
        return _wide_product(query, row, q_row, row < sq, key, lane, k_row, lane < sk, D, D_PAD)
    keys = rows_of(key, lane, k_row, lane < sk, D, D_PAD)
    return tl.dot(queries, tl.trans(keys), input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _log_sum_step(s, top, total):  # type: ignore[no-untyped-def]
    """Update the running maximum and sum of exponentials with a tile of scores."""
    higher = tl.maximum(top, tl.max(s, axis=1))
    return higher, total * tl.exp2(top - higher) + tl.sum(tl.exp2(s - higher[:, None]), axis=1)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _lse_kernel(  # type: ignore[no-untyped-def]
    query, key, starts, ends, bits, lse, scale, sq, sk, q0, width,
    q_row, q_batch, q_head, k_row, k_batch, k_head, bound_batch, bound_row,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
    CHOSEN: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """log2 of the sum of the exponentials of one head's scores, `[b, heads, sq]`.

    It is over the valid keys; with CHOSEN, over those whose bit is set.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    near = block * BLOCK + tl.arange(0, BLOCK)
    row = q0 + near
    start, end = row_bounds(starts, ends, b, row, sq, sk, bound_batch, bound_row, CAUSAL)
    first, last = extent(start, end)
    query += b * q_batch + head * q_head
    key += b * k_batch + head * k_head
    # For wide rows this loads only the first part, which is not used.
    queries = rows_of(query, row, q_row, row < sq, D, D_PAD)
    top = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    # All rows see most tiles of keys, which then need no mask.
    low = first // KEYS * KEYS
    middle = tl.minimum(tl.maximum(tl.cdiv(tl.max(start, axis=0), KEYS) * KEYS, low), last)
    high = tl.maximum(tl.min(end, axis=0) // KEYS * KEYS, middle)
    if CHOSEN:
        words = bits + (b * tl.num_programs(0) * BLOCK + near) * (width // BITS)
        middle = last  # any tile may contain keys that were not chosen
    for at in range(low, middle, KEYS):
        s = _attention_scores(
            query, queries, row, q_row, sq, key, at, k_row, sk, D, D_PAD, WIDE, KEYS
        )
        s, lane = s * scale, at + tl.arange(0, KEYS)
        if CHOSEN:
            seen = chosen(words + at // BITS, tl.arange(0, KEYS), BITS)
        else:
            seen = (lane[None, :] >= start[:, None]) & (lane[None, :] < end[:, None])
        top, total = _log_sum_step(tl.where(seen, s, float("-inf")), top, total)
    if not CHOSEN:
        for at in range(middle, high, KEYS):
            s = _attention_scores(
                query, queries, row, q_row, sq, key, at, k_row, sk, D, D_PAD, WIDE, KEYS
            )
            top, total = _log_sum_step(s * scale, top, total)
        for at in range(high, last, KEYS):
            s = _attention_scores(
                query, queries, row, q_row, sq, key, at, k_row, sk, D, D_PAD, WIDE, KEYS
            )
            s, lane = s * scale, at + tl.arange(0, KEYS)
            seen = (lane[None, :] >= start[:, None]) & (lane[None, :] < end[:, None])
            top, total = _log_sum_step(tl.where(seen, s, float("-inf")), top, total)
    tl.store(lse + (b * HEADS + head) * sq + row, top + tl.log2(total), mask=row < sq)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _tile_kernel(  # type: ignore[no-untyped-def]
    query, key, lse, q, k, weights, index_lse, starts, ends, rows, target, out, losses,
    scale, mass, sq, sk, q0, parts, width,
    aq_row, aq_batch, aq_head, ak_row, ak_batch, ak_head,
    q_row, q_batch, q_head, k_row, k_batch, w_row, w_batch, w_head, bound_batch, bound_row,
    rows_batch, rows_row,
    A_HEADS: tl.constexpr, A_D: tl.constexpr, A_D_PAD: tl.constexpr, WIDE: tl.constexpr,
    ONE_KEY: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    RELU: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr,
    INSIDE_LOGS: tl.constexpr, TARGET: tl.constexpr, REST: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Compute one tile: the target with TARGET; the row losses and G with REST."""
    b = tl.program_id(2).to(tl.int64)
    near = (tl.num_programs(1) - 1 - tl.program_id(1)) * TILE + tl.arange(0, TILE)
    row = q0 + near
    start, end = row_bounds(starts, ends, b, row, sq, sk, bound_batch, bound_row, CAUSAL)
    first, last = extent(start, end)
    lane = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = (b * tl.num_programs(1) * TILE + near)[:, None] * width + lane[None, :]
    if (tl.program_id(0) * TILE < last) & ((tl.program_id(0) + 1) * TILE > first):
        inside = row < sq
        seen = (lane[None, :] >= start[:, None]) & (lane[None, :] < end[:, None])
        mass_here = tl.zeros([TILE, TILE], tl.float32)
        if TARGET:
            a_query = query + b * aq_batch
            a_key = key + b * ak_batch
            if ONE_KEY and not WIDE:
                keys = rows_of(a_key, lane, ak_row, lane < sk, A_D, A_D_PAD)
            for head in range(0, A_HEADS):
                at_query = a_query + head * aq_head
                if WIDE:
                    at_key = a_key + head * ak_head
                    s = _wide_product(
                        at_query, row, aq_row, inside, at_key, lane, ak_row, lane < sk, A_D, A_D_PAD
                    )
                else:
                    if not ONE_KEY:
                        keys = rows_of(
                            a_key + head * ak_head, lane, ak_row, lane < sk, A_D, A_D_PAD
                        )
                    queries = rows_of(at_query, row, aq_row, inside, A_D, A_D_PAD)
                    s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
                s *= scale
                own = tl.load(lse + (b * A_HEADS + head) * sq + row, mask=inside, other=0.0)
                mass_here += tl.exp2(s - own[:, None])
            mass_here = tl.where(seen, mass_here, 0.0)
            if not REST:
                tl.store(out + place, mass_here)
        else:
            mass_here = tl.load(target + place)
        if REST:
            index = tl.zeros([TILE, TILE], tl.float32)
            keys = rows_of(k + b * k_batch, lane, k_row, lane < sk, D, D_PAD)
            for head in range(0, HEADS):
                queries = rows_of(q + b * q_batch + head * q_head, row, q_row, inside, D, D_PAD)
                s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
                if RELU:
                    s = tl.maximum(s, 0.0)
                w_at = weights + b * w_batch + row.to(tl.int64) * w_row + head * w_head
                index += s * tl.load(w_at, mask=inside, other=0.0).to(tl.float32)[:, None]
            log_p = index - tl.load(index_lse + b * sq + row, mask=inside, other=0.0)[:, None]
            log_p = tl.where(seen, log_p, 0.0)
            p = tl.where(seen, tl.exp(log_p), 0.0)
            t = mass_here / mass
            kl = tl.sum(kl_terms(t, p, log_p, EPS, INSIDE_LOGS), axis=1)
            g = p - t
            if ROWS:
                counts = tl.load(
                    rows + b * rows_batch + row.to(tl.int64) * rows_row, mask=inside, other=0
                ).to(tl.float32)
                kl *= counts
                g *= counts[:, None]
            tl.store(losses + (b * sq + row) * parts + tl.program_id(0), kl, mask=inside)
            tl.store(out + place, (g * GAIN).to(out.dtype.element_ty))
    else:
        # The gradients read larger tiles, other parts of which may be valid.
        tl.store(out + place, tl.zeros([TILE, TILE], tl.float32).to(out.dtype.element_ty))
        if REST:
            none = tl.zeros([TILE], tl.float32)
            tl.store(losses + (b * sq + row) * parts + tl.program_id(0), none, mask=row < sq)


class _Rest(NamedTuple):
    """The inputs of the losses and G of a tile, besides its target.

    Attributes:
        index_lse: log-sum-exp of the index scores, `[b, sq]`.
        rows: `[b, sq]`, whether a row counts; None: all do.
        losses: the losses of each row, by tile of keys.
        mass: the sum of a row's target.
        inside_logs: the definition of the loss up to 0.18.
    """

    index_lse: Tensor
    rows: Tensor | None
    losses: Tensor
    mass: float
    inside_logs: bool


class AttentionTiles:
    """The attention's tensors of one call, and the launches that multiply them.

    Args:
        index: the indexer's tensors.
        query: `[sq, b, attention heads, d]` of this rank.
        key: `[sk, b, attention heads or 1, d]`.
        softmax_scale: factor on the attention's products.

    Attributes:
        lse: log-sum-exp by head in base 2, `[b, heads, sq]`; computed by `sum_exponentials`.
    """

    def __init__(self, index: IndexTiles, query: Tensor, key: Tensor, softmax_scale: float) -> None:
        query, key = contiguous_rows(query), contiguous_rows(key)
        self.index, self.query, self.key = index, query, key
        self.scale, self.heads = softmax_scale * LOG2_E, query.size(2)
        self.block = min(BLOCK, index.tile)
        self.lse = query.new_empty(index.batch, self.heads, index.sq, dtype=torch.float32)

    def _widths(self) -> tuple[int, int, bool]:
        """The width, the padded width of an operand, and whether rows are read in parts."""
        width = self.query.size(-1)
        return (width, 64, True) if width > 128 else (width, padded(width), False)

    def _strides(self) -> tuple[int, ...]:
        """The strides of queries and keys; a single key for all heads has head stride 0."""
        key = self.key
        key_head = 0 if key.size(2) == 1 else key.stride(2)
        return (*self.query.stride()[:3], *key.stride()[:2], key_head)

    def sum_exponentials(self, part: tuple[int, int], bits: Tensor | None = None) -> None:
        """Compute the log-sum-exp by head of a part's queries, which their target needs.

        Args:
            part: first query, and the query after the last.
            bits: the keys to sum over, `[b, queries, words]` padded to complete tiles, with
                `index.bits` keys per word; None: all valid keys.
        """
        index = self.index
        width, step, wide = self._widths()
        blocks = triton.cdiv(part[1] - part[0], index.tile)
        _lse_kernel[(blocks, index.batch * self.heads)](
            self.query, self.key, *index.bounds[:2], self.lse if bits is None else bits, self.lse,
            self.scale, index.sq, index.sk, part[0], index.columns,
            *self._strides(), *index.bounds.strides,
            HEADS=self.heads, D=width, D_PAD=step, WIDE=wide, BLOCK=index.tile,
            KEYS=min(LSE_KEYS, index.tile), CAUSAL=index.causal,
            CHOSEN=bits is not None, BITS=index.bits, **LSE_LAUNCH,
        )  # fmt: skip

    def target(self, part: tuple[int, int]) -> Tensor:
        """This rank's target of one part, `[b, queries, keys]` padded to complete tiles; 0 for keys
        that are not valid."""
        out = self.index.scratch(part, torch.float32)
        self._launch(part, out, None, None)
        return out

    def _launch(
        self, part: tuple[int, int], out: Tensor, target: Tensor | None, rest: _Rest | None
    ) -> None:
        """Write the target of a part, or its losses and G, from the target if that is given."""
        index = self.index
        q, k, weights = index.q, index.k, index.weights
        width, step, wide = self._widths()
        columns = index.columns // self.block
        index_lse, rows, losses, mass, inside_logs = rest or _Rest(out, None, out, 1.0, False)
        _tile_kernel[(columns, out.size(1) // self.block, index.batch)](
            self.query, self.key, self.lse, q, k, weights, index_lse, *index.bounds[:2],
            index_lse if rows is None else rows, out if target is None else target, out, losses,
            self.scale, mass, index.sq, index.sk, part[0], columns, index.columns,
            *self._strides(), *q.stride()[:3], *k.stride()[:2], *weights.stride(),
            *index.bounds.strides, *strides_of(rows),
            A_HEADS=self.heads, A_D=width, A_D_PAD=step, WIDE=wide, ONE_KEY=self.key.size(2) == 1,
            HEADS=index.heads, D=index.width, D_PAD=padded(index.width), TILE=self.block,
            RELU=index.use_relu, CAUSAL=index.causal, ROWS=rows is not None, EPS=EPSILON,
            INSIDE_LOGS=inside_logs, TARGET=target is None, REST=rest is not None,
            GAIN=index.gain, **TILE_LAUNCH,
        )  # fmt: skip


class DenseTarget(AttentionTiles):
    """The attention's part of one call of the dense loss.

    Args:
        index: the indexer's tensors.
        query: `[sq, b, attention heads, d]` of this rank.
        key: `[sk, b, attention heads or 1, d]`.
        index_lse: log-sum-exp of the index scores, `[b, sq]`.
        rows: `[b, sq]`, whether a row counts; None: all do.
        softmax_scale: factor on the attention's products.
        inside_logs: the definition of the loss up to 0.18.
        ranks: the number of ranks over which the attention heads are split.

    Attributes:
        losses: the losses of each row, by tile of keys; complete after the last part of G.
    """

    def __init__(
        self,
        index: IndexTiles,
        query: Tensor,
        key: Tensor,
        index_lse: Tensor,
        *,
        rows: Tensor | None,
        softmax_scale: float,
        inside_logs: bool,
        ranks: int,
    ) -> None:
        super().__init__(index, query, key, softmax_scale)
        self.losses = index_lse.new_empty(index.batch, index.sq, index.columns // self.block)
        mass = float(max(self.heads * ranks, 1))
        self.rest = _Rest(index_lse, rows, self.losses, mass, inside_logs)
        self.sum_exponentials((0, index.sq))

    def gradient(self, part: tuple[int, int], target: Tensor | None = None) -> Tensor:
        """Compute G and the row losses of one part, from the target of all ranks if it is given."""
        out = self.index.scratch(part, self.index.dtype)
        self._launch(part, out, target, self.rest)
        return out
