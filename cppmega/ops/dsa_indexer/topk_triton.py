"""DSA index scores and their exact top-k on CUDA, in one launch that keeps no `[b, sq, sk]`.

The grid is persistent: a few programs per SM, each of which takes blocks of a few queries in turn,
the longest rows first. A program holds Q and the head weights of a block. It reads K once per
block, multiplies tiles of keys with all heads of its queries at once (bf16 tensor cores, fp32
sums), applies ReLU and the weights, sums the heads in registers, and writes the fp32 scores to its
own scratch memory, which the next block overwrites and which is small enough to stay mostly in L2.
Then it searches for the top-k-th largest score of each query by counting, with three candidates per
pass over the row, first dividing the range of numbers and then that of bit patterns, and writes the
keys once, in ascending order.

On an H200 the products of the scores run at 42 % of 790 TFLOP/s, since ReLU, weights and the sum
over heads follow the product that they use. The selection is limited by the latency of about five
readings of each row from L1 and L2 (`benchmarks/results/dsa_indexer_designs.md`).

The choice is a function of the scores: ties are broken by the lowest key, independent of the
launch. There are no atomics, nothing waits for the device, and the grid does not depend on the
data.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.bounds import RowBounds
from cppmega.ops.common.device import contiguous_rows
from cppmega.ops.common.launch import on_its_device

SCRATCH_BYTES = 1 << 30
"""Maximum scratch memory of one launch. On 132 SMs 4096 keys need 17 MiB, 32k keys 135 MiB."""

_INVALID: tl.constexpr = tl.constexpr(-2139095041)
"""`_ordered(-inf)`, the rank of a key that may not be chosen."""

_NUMBER_STEPS: tl.constexpr = tl.constexpr(6)
"""Steps of the search that divide the range of numbers; later steps divide the bit patterns."""


class Launch(NamedTuple):
    """Tile sizes of one launch; the result is bitwise identical for all of them.

    Attributes:
        columns: queries times heads per product.
        keys: keys per product.
        chunk: scores of each of its queries that a program reads at a time while counting.
        warps: warps per program.
        stages: tiles of keys in flight.
        programs: programs per SM.
    """

    columns: int = 128
    keys: int = 64
    chunk: int = 128
    warps: int = 4
    stages: int = 3
    programs: int = 3


@triton.jit
def _ordered(x):
    """An integer with the same order as the fp32 number; the mapping of integers is its own
    inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(order):
    """The fp32 number of an `_ordered` integer."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _score_tile(
    k,
    q,
    weights,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    RELU: tl.constexpr,
):
    """Scores `[BLOCK_N, ROWS]` of keys `[BLOCK_N, D]` for queries `[D, ROWS * H]`."""
    s = tl.dot(k, q, input_precision="ieee")
    if RELU:
        s = tl.maximum(s, 0.0)
    return tl.sum(tl.reshape(s * weights[None, :], (BLOCK_N, ROWS, H)), axis=2)


@triton.jit
def _packed(c1, c2, c3):
    """Sum three counters over the columns, 21 bits each, with one exchange between the warps."""
    packed = c1.to(tl.int64) + (c2.to(tl.int64) << 21) + (c3.to(tl.int64) << 42)
    total = tl.sum(packed, axis=1)
    return (
        (total & 0x1FFFFF).to(tl.int32),
        ((total >> 21) & 0x1FFFFF).to(tl.int32),
        (total >> 42).to(tl.int32),
    )


@triton.jit
def _counts(rows, offs, first, end, t1, t2, t3, CHUNK: tl.constexpr):
    """Count the scores of each row that are at least as large as each of three candidates."""
    c1 = tl.zeros([rows.shape[0], CHUNK], tl.int32)
    c2 = tl.zeros([rows.shape[0], CHUNK], tl.int32)
    c3 = tl.zeros([rows.shape[0], CHUNK], tl.int32)
    for at in tl.range(first, end, CHUNK, loop_unroll_factor=4):
        x = tl.load(rows + at + offs, mask=at + offs < end, other=float("-inf"))
        x = _ordered(x)
        c1 += (x >= t1[:, None]).to(tl.int32)
        c2 += (x >= t2[:, None]).to(tl.int32)
        c3 += (x >= t3[:, None]).to(tl.int32)
    return _packed(c1, c2, c3)


@triton.jit
def _extent(rows, offs, first, end, CHUNK: tl.constexpr):
    """The maximum of each row, how many keys are valid, and how many scores are >= 0 and > 0."""
    row_max = tl.full([rows.shape[0], CHUNK], _INVALID, tl.int32)
    valid = tl.zeros([rows.shape[0], CHUNK], tl.int32)
    nonnegative = tl.zeros([rows.shape[0], CHUNK], tl.int32)
    positive = tl.zeros([rows.shape[0], CHUNK], tl.int32)
    for at in tl.range(first, end, CHUNK, loop_unroll_factor=4):
        x = tl.load(rows + at + offs, mask=at + offs < end, other=float("-inf"))
        x = _ordered(x)
        row_max = tl.maximum(row_max, x)
        valid += (x > _INVALID).to(tl.int32)
        nonnegative += (x >= 0).to(tl.int32)
        positive += (x > 0).to(tl.int32)
    valid_sum, nonnegative_sum, positive_sum = _packed(valid, nonnegative, positive)
    return tl.max(row_max, axis=1), valid_sum, nonnegative_sum, positive_sum


@triton.jit
def _candidates(step, low, least, high, most, want, row_max):
    """Three candidates strictly between the bounds, ascending.

    The first steps interpolate the threshold from the counts, as if scores were spread evenly: this
    takes about five passes over a row, where bisecting bit patterns takes eight. Later steps bisect
    the bit patterns, which ends after sixteen, whatever the scores.
    """
    t2 = (low & high) + ((low ^ high) >> 1)
    t1 = (low & t2) + ((low ^ t2) >> 1)
    t3 = (t2 & high) + ((t2 ^ high) >> 1)
    if step < _NUMBER_STEPS:
        base = tl.where(low == _INVALID + 1, -tl.abs(_number(row_max)), _number(low))
        span = _number(high) - base
        fraction = (least - want).to(tl.float32) / tl.maximum(least - most, 1).to(tl.float32)
        margin = 0.0625
        if step == 0:
            fraction = tl.full(fraction.shape, 0.5, tl.float32)
            margin = 0.25
        t1 = _ordered(base + span * tl.maximum(fraction - margin, 0.001))
        t2 = _ordered(base + span * fraction)
        t3 = _ordered(base + span * tl.minimum(fraction + margin, 0.999))
    t1 = tl.minimum(tl.maximum(t1, low + 1), high - 1)
    t2 = tl.minimum(tl.maximum(t2, t1), high - 1)
    return t1, t2, tl.minimum(tl.maximum(t3, t2), high - 1)


@triton.jit
def _thresholds(rows, offs, first, end, topk, CHUNK: tl.constexpr):
    """For each row: the maximum, the number of keys to choose, the score above which all keys are
    chosen, and how many of those equal to it are."""
    row_max, valid, nonnegative, positive = _extent(rows, offs, first, end, CHUNK)
    want = tl.minimum(valid, topk)
    # At least `want` scores are >= low, namely `least`; fewer are >= high, namely `most`. ReLU
    # produces exact zeros, so a plateau at the cut is common, and 0 is tried as a candidate.
    low = tl.where(positive >= want, 1, tl.where(nonnegative >= want, 0, _INVALID + 1))
    least = tl.where(positive >= want, positive, tl.where(nonnegative >= want, nonnegative, valid))
    high = tl.where(positive >= want, row_max + 1, tl.where(nonnegative >= want, 1, 0))
    most = tl.where(positive >= want, 0, tl.where(nonnegative >= want, positive, nonnegative))
    step = 0
    while tl.max(((low + 1 < high) & (least != want)).to(tl.int32), axis=0) > 0:
        t1, t2, t3 = _candidates(step, low, least, high, most, want, row_max)
        c1, c2, c3 = _counts(rows, offs, first, end, t1, t2, t3, CHUNK)
        active = (low + 1 < high) & (least != want)
        ge1, ge2, ge3 = (c1 >= want) & active, (c2 >= want) & active, (c3 >= want) & active
        low = tl.where(ge3, t3, tl.where(ge2, t2, tl.where(ge1, t1, low)))
        least = tl.where(ge3, c3, tl.where(ge2, c2, tl.where(ge1, c1, least)))
        lt1, lt2, lt3 = (c1 < want) & active, (c2 < want) & active, (c3 < want) & active
        high = tl.where(lt1, t1, tl.where(lt2, t2, tl.where(lt3, t3, high)))
        most = tl.where(lt1, c1, tl.where(lt2, c2, tl.where(lt3, c3, most)))
        step += 1
    # If exactly `want` scores reach the threshold, all of those equal to it are needed.
    return row_max, want, low, tl.where(least == want, 1 << 30, want - most)


@triton.jit
def _write_choice(
    rows, offs, first, end, threshold, need, want, out, mask_row, indices, chosen, topk,
    SCORES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the chosen keys, ascending, -1 after the last, and their scores if requested."""
    above_before = tl.zeros(want.shape, tl.int32)
    equal_before = tl.zeros(want.shape, tl.int32)
    for at in range(first, end, CHUNK):
        score = tl.load(rows + at + offs, mask=at + offs < end, other=float("-inf"))
        x = _ordered(score)
        above = x > threshold[:, None]
        equal = x == threshold[:, None]
        packed = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        scan = tl.cumsum(packed, axis=1)
        equals = equal_before[:, None] + (scan >> 16)
        slot = above_before[:, None] + (scan & 0xFFFF) + tl.minimum(equals, need[:, None]) - 1
        take = (above | (equal & (equals <= need[:, None]))) & (want > 0)[:, None]
        tl.store(indices + out[:, None] + slot, at + offs, mask=take)
        if SCORES:
            tl.store(chosen + out[:, None] + slot, score, mask=take)
        total = tl.sum(packed, axis=1)
        above_before += total & 0xFFFF
        equal_before += total >> 16
    for at in range(tl.min(want, axis=0), topk, CHUNK):
        rest = (at + offs >= want[:, None]) & (at + offs < topk) & mask_row[:, None]
        tl.store(indices + out[:, None] + at + offs, -1, mask=rest)
        if SCORES:
            tl.store(chosen + out[:, None] + at + offs, float("-inf"), mask=rest)


@triton.jit
def _log_sum_exp(rows, offs, first, end, m_i, CHUNK: tl.constexpr):
    """Log of the sum of the exponentials of each row, -inf without a valid key."""
    l_i = tl.zeros([rows.shape[0], CHUNK], tl.float32)
    for at in tl.range(first, end, CHUNK, loop_unroll_factor=4):
        x = tl.load(rows + at + offs, mask=at + offs < end, other=float("-inf"))
        l_i += tl.where(x > float("-inf"), tl.exp(x - m_i[:, None]), 0.0)
    return m_i + tl.log(tl.sum(l_i, axis=1))


@on_its_device
@triton.jit
def _choose_kernel(
    q_ptr, k_ptr, weights, starts, ends, scratch, indices, chosen, lse,
    batch, sq, sk, width, topk,
    q_row, q_batch, q_head, k_row, k_batch, w_row, w_batch, w_head, bound_batch, bound_row,
    HEADS: tl.constexpr, D: tl.constexpr, H_PAD: tl.constexpr, D_PAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, RELU: tl.constexpr,
    CAUSAL: tl.constexpr, SCORES: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """The chosen keys of blocks of queries; with SCORES their scores, with LSE the log-sum-exps."""
    blocks = tl.cdiv(sq, ROWS)
    scratch_ptr = scratch + tl.program_id(0).to(tl.int64) * ROWS * width
    row_lane = tl.arange(0, ROWS)
    column = tl.arange(0, ROWS * H_PAD)
    head = column % H_PAD
    offs_d = tl.arange(0, D_PAD)
    offs_n = tl.arange(0, BLOCK_N)
    for item in range(tl.program_id(0), blocks * batch, tl.num_programs(0)):
        b = (item % batch).to(tl.int64)
        # The longest rows of a causal mask come first, so that the last programs finish together.
        block = blocks - 1 - item // batch
        row = block * ROWS + row_lane
        mask_m = row < sq
        if CAUSAL:
            start = tl.zeros([ROWS], tl.int32)
            end = tl.where(mask_m, row + 1 + sk - sq, 0)
        else:
            offs_bound = b * bound_batch + row.to(tl.int64) * bound_row
            start = tl.load(starts + offs_bound, mask=mask_m, other=0).to(tl.int32)
            start = tl.maximum(start, 0)
            end = tl.load(ends + offs_bound, mask=mask_m, other=0).to(tl.int32)
        end = tl.minimum(end, sk)
        start = tl.where(end > start, start, 2147483647)
        last = tl.maximum(tl.max(end, axis=0), 0)
        # Not after `last`, where no row sees a key: an unrolled loop must not run backwards.
        first = tl.minimum(tl.min(start, axis=0), last) // BLOCK_N * BLOCK_N
        q_at = (block * ROWS + column // H_PAD).to(tl.int64)
        mask_mh = (q_at < sq) & (head < HEADS)
        q = tl.load(
            q_ptr + b * q_batch + (q_at * q_row + head * q_head)[None, :] + offs_d[:, None],
            mask=mask_mh[None, :] & (offs_d < D)[:, None],
            other=0.0,
        )
        w = tl.load(weights + b * w_batch + q_at * w_row + head * w_head, mask=mask_mh, other=0.0)
        w = w.to(tl.float32)
        for first_n in range(first, last, BLOCK_N):
            key_n = first_n + offs_n
            k = tl.load(
                k_ptr + b * k_batch + key_n.to(tl.int64)[:, None] * k_row + offs_d[None, :],
                mask=(key_n < sk)[:, None] & (offs_d < D)[None, :],
                other=0.0,
            )
            s = _score_tile(k, q, w, BLOCK_N, ROWS, H_PAD, RELU)
            # -0.0 and 0.0 must compare equal.
            s = tl.where(s == 0.0, 0.0, s)
            valid = (key_n[:, None] >= start[None, :]) & (key_n[:, None] < end[None, :])
            s = tl.where(valid, s, float("-inf"))
            tl.store(scratch_ptr + row_lane[None, :] * width + key_n[:, None], s)
        tl.debug_barrier()
        rows = scratch_ptr + row_lane[:, None] * width
        offs_chunk = tl.arange(0, CHUNK)[None, :]
        row_max, want, threshold, need = _thresholds(rows, offs_chunk, first, last, topk, CHUNK)
        out = (b * sq + row) * topk
        _write_choice(
            rows, offs_chunk, first, last, threshold, need, want, out, mask_m, indices, chosen,
            topk, SCORES, CHUNK,
        )  # fmt: skip
        if LSE:
            lse_i = _log_sum_exp(rows, offs_chunk, first, last, _number(row_max), CHUNK)
            tl.store(lse + b * sq + row, lse_i, mask=mask_m)
        tl.debug_barrier()


@functools.cache
def processors(device: torch.device) -> int:
    """The number of SMs of a device; the interpreter, on a CPU, counts as two."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_for(heads: int, width: int) -> Launch:
    """Tile sizes for heads and widths (powers of two).

    With four rows, the chunk assigns one row to each warp, which then counts independently.
    """
    columns = max(128, heads)
    return Launch(
        columns, chunk=max(32, 4 * 128 * heads // columns), stages=3 if width <= 64 else 2
    )


def choose(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    *,
    starts: Tensor | None,
    ends: Tensor | None,
    use_relu: bool,
    want_scores: bool = False,
    want_lse: bool = False,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return chosen keys `[b, sq, topk]` in int32, and their scores and the rows' log-sum-exp in
    fp32.

    The arguments are those of `dsa_indexer.choose_keys`; `topk` is at most the number of keys.
    """
    sq, batch, heads, width = q.shape
    sk = k.shape[0]
    indices = torch.empty(batch, sq, topk, dtype=torch.int32, device=q.device)
    chosen = torch.empty_like(indices, dtype=torch.float32) if want_scores else None
    lse = torch.empty(batch, sq, dtype=torch.float32, device=q.device) if want_lse else None
    if not indices.numel():
        return indices, chosen, lse
    q, k = contiguous_rows(q), contiguous_rows(k)
    h_pad = triton.next_power_of_2(heads)
    d_pad = max(16, triton.next_power_of_2(width))
    launch = launch or launch_for(h_pad, d_pad)
    rows = max(1, launch.columns // h_pad)
    row_width = triton.cdiv(sk, launch.keys) * launch.keys
    programs = min(
        triton.cdiv(sq, rows) * batch,
        processors(q.device) * launch.programs,
        max(1, SCRATCH_BYTES // (4 * rows * row_width)),
    )
    scratch = torch.empty(programs, rows, row_width, dtype=torch.float32, device=q.device)
    bounds = RowBounds.of(starts, ends, batch, sq, scratch)
    options: dict[str, Any] = {"num_warps": launch.warps, "num_stages": launch.stages}
    _choose_kernel[(programs,)](
        q, k, weights, *bounds[:2], scratch, indices,
        indices if chosen is None else chosen, scratch if lse is None else lse,
        batch, sq, sk, row_width, topk,
        *q.stride()[:3], *k.stride()[:2], *weights.stride(), *bounds.strides,
        HEADS=heads, D=width, H_PAD=h_pad, D_PAD=d_pad, ROWS=rows, BLOCK_N=launch.keys,
        CHUNK=launch.chunk, RELU=use_relu, CAUSAL=bounds.causal,
        SCORES=want_scores, LSE=want_lse, **options,
    )  # fmt: skip
    return indices, chosen, lse
