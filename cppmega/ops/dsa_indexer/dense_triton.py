"""The indexer's dense loss on CUDA: both distributions over all valid keys.

- `_lse_kernel`: grid (blocks of queries, heads x batch). A program holds Q, m_i and l_i of one head
  of the attention, reads each valid K once, and writes the log-sum-exps once.
- `_tile_kernel`: grid (tiles of keys, tiles of queries, batch). A program holds a `[TILE, TILE]`
  sum of P over the attention's heads, the target, and then the index scores of the same tile. It
  reads Q, K and the log-sum-exps of each head once, and writes the row losses and G = p - t, which
  `tiles_triton` turns into gradients, once.

Tensor cores limit both. On an H200 their products run at about half of 790 TFLOP/s, because a
program waits for each product that it has issued, which therefore overlaps only with the work of
other programs (`benchmarks/results/dsa_indexer_designs.md`).

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
from cppmega.ops.common.device import contiguous_rows, gpu_of
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
Launch = tuple[int, dict[str, Any], dict[str, Any]]
"""The tile of the target, and the launches of both kernels."""
NARROW: Launch = (BLOCK, LSE_LAUNCH, TILE_LAUNCH)
HOPPER_WIDE: Launch = (128, LSE_LAUNCH | {"num_stages": 3}, {"num_warps": 8, "num_stages": 4})
"""For rows that are read in parts, of which shared memory holds more on Hopper."""


@triton.jit
def _wide_product(
    a_ptr, a_row, a_step, a_mask, b_ptr, b_row, b_step, b_mask,
    D: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """left @ right.T for rows too wide for shared memory, a part of the width at a time."""
    s = tl.zeros([a_row.shape[0], b_row.shape[0]], tl.float32)
    for first in range(0, D, STEP):
        offs_d = first + tl.arange(0, STEP)
        a = tl.load(
            a_ptr + a_row.to(tl.int64)[:, None] * a_step + offs_d[None, :],
            mask=a_mask[:, None] & (offs_d < D)[None, :],
            other=0.0,
        )
        b = tl.load(
            b_ptr + b_row.to(tl.int64)[:, None] * b_step + offs_d[None, :],
            mask=b_mask[:, None] & (offs_d < D)[None, :],
            other=0.0,
        )
        s = tl.dot(a, tl.trans(b), s, input_precision="ieee")
    return s


@triton.jit
def _attention_scores(
    q_ptr, q, offs_m, q_row, sq, k_ptr, first, k_row, sk,
    D: tl.constexpr, D_PAD: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Products of a block of queries with the keys starting at `at`."""
    offs_n = first + tl.arange(0, BLOCK_N)
    if WIDE:
        return _wide_product(
            q_ptr, offs_m, q_row, offs_m < sq, k_ptr, offs_n, k_row, offs_n < sk, D, D_PAD
        )
    k = rows_of(k_ptr, offs_n, k_row, offs_n < sk, D, D_PAD)
    return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def _log_sum_step(s, m_i, l_i):
    """Update the running maximum and sum of exponentials with a tile of scores."""
    m_new = tl.maximum(m_i, tl.max(s, axis=1))
    return m_new, l_i * tl.exp2(m_i - m_new) + tl.sum(tl.exp2(s - m_new[:, None]), axis=1)


@on_its_device
@triton.jit
def _lse_kernel(
    q_ptr, k_ptr, starts, ends, bits, lse, scale, sq, sk, q0, width,
    q_row, q_batch, q_head, k_row, k_batch, k_head, bound_batch, bound_row,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    CHOSEN: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """log2 of the sum of the exponentials of one head's scores, `[b, heads, sq]`.

    It is over the valid keys; with CHOSEN, over those whose bit is set.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    offs_part = block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_m = q0 + offs_part
    start, end = row_bounds(starts, ends, b, offs_m, sq, sk, bound_batch, bound_row, CAUSAL)
    first, last = extent(start, end)
    q_ptr += b * q_batch + head * q_head
    k_ptr += b * k_batch + head * k_head
    # For wide rows this loads only the first part, which is not used.
    q = rows_of(q_ptr, offs_m, q_row, offs_m < sq, D, D_PAD)
    m_i = tl.full([BLOCK_M], -3.0e38, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    # All rows see most tiles of keys, which then need no mask.
    low = first // BLOCK_N * BLOCK_N
    middle = tl.minimum(tl.maximum(tl.cdiv(tl.max(start, axis=0), BLOCK_N) * BLOCK_N, low), last)
    high = tl.maximum(tl.min(end, axis=0) // BLOCK_N * BLOCK_N, middle)
    if CHOSEN:
        words = bits + (b * tl.num_programs(0) * BLOCK_M + offs_part) * (width // BITS)
        middle = last  # any tile may contain keys that were not chosen
    for first_n in range(low, middle, BLOCK_N):
        s = _attention_scores(
            q_ptr, q, offs_m, q_row, sq, k_ptr, first_n, k_row, sk, D, D_PAD, WIDE, BLOCK_N
        )
        s, offs_n = s * scale, first_n + tl.arange(0, BLOCK_N)
        if CHOSEN:
            mask = chosen(words + first_n // BITS, tl.arange(0, BLOCK_N), BITS)
        else:
            mask = (offs_n[None, :] >= start[:, None]) & (offs_n[None, :] < end[:, None])
        m_i, l_i = _log_sum_step(tl.where(mask, s, float("-inf")), m_i, l_i)
    if not CHOSEN:
        for first_n in range(middle, high, BLOCK_N):
            s = _attention_scores(
                q_ptr, q, offs_m, q_row, sq, k_ptr, first_n, k_row, sk, D, D_PAD, WIDE, BLOCK_N
            )
            m_i, l_i = _log_sum_step(s * scale, m_i, l_i)
        for first_n in range(high, last, BLOCK_N):
            s = _attention_scores(
                q_ptr, q, offs_m, q_row, sq, k_ptr, first_n, k_row, sk, D, D_PAD, WIDE, BLOCK_N
            )
            s, offs_n = s * scale, first_n + tl.arange(0, BLOCK_N)
            mask = (offs_n[None, :] >= start[:, None]) & (offs_n[None, :] < end[:, None])
            m_i, l_i = _log_sum_step(tl.where(mask, s, float("-inf")), m_i, l_i)
    tl.store(lse + (b * HEADS + head) * sq + offs_m, m_i + tl.log2(l_i), mask=offs_m < sq)


@on_its_device
@triton.jit
def _tile_kernel(
    aq_ptr, ak_ptr, lse, q_ptr, k_ptr, weights, index_lse, starts, ends, rows, target, out, losses,
    scale, target_sum, sq, sk, q0, parts, width,
    aq_row, aq_batch, aq_head, ak_row, ak_batch, ak_head,
    q_row, q_batch, q_head, k_row, k_batch, w_row, w_batch, w_head, bound_batch, bound_row,
    rows_batch, rows_row,
    A_HEADS: tl.constexpr, A_D: tl.constexpr, A_D_PAD: tl.constexpr, WIDE: tl.constexpr,
    ONE_KEY: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    RELU: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr,
    INSIDE_LOGS: tl.constexpr, TARGET: tl.constexpr, LOSS: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Compute one tile: the target with TARGET; the row losses and G with LOSS."""
    b = tl.program_id(2).to(tl.int64)
    offs_part = (tl.num_programs(1) - 1 - tl.program_id(1)) * TILE + tl.arange(0, TILE)
    offs_m = q0 + offs_part
    start, end = row_bounds(starts, ends, b, offs_m, sq, sk, bound_batch, bound_row, CAUSAL)
    first, last = extent(start, end)
    offs_n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    offs = (b * tl.num_programs(1) * TILE + offs_part)[:, None] * width + offs_n[None, :]
    if (tl.program_id(0) * TILE < last) & ((tl.program_id(0) + 1) * TILE > first):
        mask_m = offs_m < sq
        mask = (offs_n[None, :] >= start[:, None]) & (offs_n[None, :] < end[:, None])
        p_sum = tl.zeros([TILE, TILE], tl.float32)
        if TARGET:
            aq_base = aq_ptr + b * aq_batch
            ak_base = ak_ptr + b * ak_batch
            if ONE_KEY and not WIDE:
                k = rows_of(ak_base, offs_n, ak_row, offs_n < sk, A_D, A_D_PAD)
            for head in range(0, A_HEADS):
                aq_h = aq_base + head * aq_head
                if WIDE:
                    ak_h = ak_base + head * ak_head
                    s = _wide_product(
                        aq_h, offs_m, aq_row, mask_m, ak_h, offs_n, ak_row, offs_n < sk,
                        A_D, A_D_PAD,
                    )  # fmt: skip
                else:
                    if not ONE_KEY:
                        k = rows_of(
                            ak_base + head * ak_head, offs_n, ak_row, offs_n < sk, A_D, A_D_PAD
                        )
                    q = rows_of(aq_h, offs_m, aq_row, mask_m, A_D, A_D_PAD)
                    s = tl.dot(q, tl.trans(k), input_precision="ieee")
                s *= scale
                lse_i = tl.load(lse + (b * A_HEADS + head) * sq + offs_m, mask=mask_m, other=0.0)
                p_sum += tl.exp2(s - lse_i[:, None])
            p_sum = tl.where(mask, p_sum, 0.0)
            if not LOSS:
                tl.store(out + offs, p_sum)
        else:
            p_sum = tl.load(target + offs)
        if LOSS:
            scores = tl.zeros([TILE, TILE], tl.float32)
            k = rows_of(k_ptr + b * k_batch, offs_n, k_row, offs_n < sk, D, D_PAD)
            for head in range(0, HEADS):
                q = rows_of(q_ptr + b * q_batch + head * q_head, offs_m, q_row, mask_m, D, D_PAD)
                s = tl.dot(q, tl.trans(k), input_precision="ieee")
                if RELU:
                    s = tl.maximum(s, 0.0)
                w_ptrs = weights + b * w_batch + offs_m.to(tl.int64) * w_row + head * w_head
                scores += s * tl.load(w_ptrs, mask=mask_m, other=0.0).to(tl.float32)[:, None]
            log_p = scores - tl.load(index_lse + b * sq + offs_m, mask=mask_m, other=0.0)[:, None]
            log_p = tl.where(mask, log_p, 0.0)
            p = tl.where(mask, tl.exp(log_p), 0.0)
            t = p_sum / target_sum
            kl = tl.sum(kl_terms(t, p, log_p, EPS, INSIDE_LOGS), axis=1)
            g = p - t
            if ROWS:
                counts = tl.load(
                    rows + b * rows_batch + offs_m.to(tl.int64) * rows_row, mask=mask_m, other=0
                ).to(tl.float32)
                kl *= counts
                g *= counts[:, None]
            tl.store(losses + (b * sq + offs_m) * parts + tl.program_id(0), kl, mask=mask_m)
            tl.store(out + offs, (g * GAIN).to(out.dtype.element_ty))
    else:
        # The gradients read larger tiles, other parts of which may be valid.
        tl.store(out + offs, tl.zeros([TILE, TILE], tl.float32).to(out.dtype.element_ty))
        if LOSS:
            zeros = tl.zeros([TILE], tl.float32)
            tl.store(losses + (b * sq + offs_m) * parts + tl.program_id(0), zeros, mask=offs_m < sq)


class _LossInputs(NamedTuple):
    """What the losses and G of a tile depend on, except its target.

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

    of_hopper: Launch = HOPPER_WIDE

    def __init__(self, index: IndexTiles, query: Tensor, key: Tensor, softmax_scale: float) -> None:
        query, key = contiguous_rows(query), contiguous_rows(key)
        self.index, self.query, self.key = index, query, key
        self.scale, self.heads = softmax_scale * LOG2_E, query.size(2)
        in_parts = self._widths()[2] and gpu_of(query.device).capability[0] == 9
        block, self.lse_launch, self.tile_launch = self.of_hopper if in_parts else NARROW
        self.block = min(block, index.tile)
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
            HEADS=self.heads, D=width, D_PAD=step, WIDE=wide, BLOCK_M=index.tile,
            BLOCK_N=min(LSE_KEYS, index.tile), CAUSAL=index.causal,
            CHOSEN=bits is not None, BITS=index.bits, **self.lse_launch,
        )  # fmt: skip

    def target(self, part: tuple[int, int]) -> Tensor:
        """This rank's target of one part, `[b, queries, keys]` padded to complete tiles; 0 for keys
        that are not valid."""
        out = self.index.scratch(part, torch.float32)
        self._launch(part, out, None, None)
        return out

    def _launch(
        self, part: tuple[int, int], out: Tensor, target: Tensor | None, loss: _LossInputs | None
    ) -> None:
        """Write the target of a part, or its losses and G, from the target if that is given."""
        index = self.index
        q, k, weights = index.q, index.k, index.weights
        width, step, wide = self._widths()
        columns = index.columns // self.block
        index_lse, rows, losses, mass, inside_logs = loss or _LossInputs(out, None, out, 1.0, False)
        _tile_kernel[(columns, out.size(1) // self.block, index.batch)](
            self.query, self.key, self.lse, q, k, weights, index_lse, *index.bounds[:2],
            index_lse if rows is None else rows, out if target is None else target, out, losses,
            self.scale, mass, index.sq, index.sk, part[0], columns, index.columns,
            *self._strides(), *q.stride()[:3], *k.stride()[:2], *weights.stride(),
            *index.bounds.strides, *strides_of(rows),
            A_HEADS=self.heads, A_D=width, A_D_PAD=step, WIDE=wide, ONE_KEY=self.key.size(2) == 1,
            HEADS=index.heads, D=index.width, D_PAD=padded(index.width), TILE=self.block,
            RELU=index.use_relu, CAUSAL=index.causal, ROWS=rows is not None, EPS=EPSILON,
            INSIDE_LOGS=inside_logs, TARGET=target is None, LOSS=loss is not None,
            GAIN=index.gain, **self.tile_launch,
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

    of_hopper = NARROW  # the index scores of a larger tile would leave too few registers

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
        self.loss_inputs = _LossInputs(index_lse, rows, self.losses, mass, inside_logs)
        self.sum_exponentials((0, index.sq))

    def gradient(self, part: tuple[int, int], target: Tensor | None = None) -> Tensor:
        """Compute G and the row losses of one part, from the target of all ranks if it is given."""
        out = self.index.scratch(part, self.index.dtype)
        self._launch(part, out, target, self.loss_inputs)
        return out
