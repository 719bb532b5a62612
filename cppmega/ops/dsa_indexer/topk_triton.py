"""DSA index scores and their exact top-k on CUDA, in one launch that keeps no `[b, sq, sk]`.

A program processes blocks of a few queries in turn. It multiplies tiles of keys with all heads of
its queries at once (bf16 tensor cores, fp32 sums), applies ReLU and the head weights, sums the
heads in registers, and writes the fp32 scores of its queries to its own scratch memory, which the
next block overwrites and which is small enough to stay mostly in the L2 cache. Then it searches for
the top-k-th largest score of each query by counting, with three candidates per pass over the row,
first dividing the range of numbers and then that of bit patterns, and writes the keys in ascending
order.

The choice is therefore a function of the scores: ties are broken by the lowest key, independent of
the launch. There are no atomics, nothing waits for the device, and the grid does not depend on the
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


@triton.jit  # type: ignore[untyped-decorator]
def _ordered(x):  # type: ignore[no-untyped-def]
    """An integer with the same order as the fp32 number; the mapping of integers is its own
    inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _number(order):  # type: ignore[no-untyped-def]
    """The fp32 number of an `_ordered` integer."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _score_tile(  # type: ignore[no-untyped-def]
    keys,
    queries,
    weights,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    RELU: tl.constexpr,
):
    """Scores `[KEYS, ROWS]` of keys `[KEYS, D]` for queries `[D, ROWS * H]`."""
    s = tl.dot(keys, queries, input_precision="ieee")
    if RELU:
        s = tl.maximum(s, 0.0)
    return tl.sum(tl.reshape(s * weights[None, :], (KEYS, ROWS, H)), axis=2)


@triton.jit  # type: ignore[untyped-decorator]
def _packed(one, two, three):  # type: ignore[no-untyped-def]
    """Sum three counters over the columns, 21 bits each, with one exchange between the warps."""
    packed = one.to(tl.int64) + (two.to(tl.int64) << 21) + (three.to(tl.int64) << 42)
    total = tl.sum(packed, axis=1)
    return (
        (total & 0x1FFFFF).to(tl.int32),
        ((total >> 21) & 0x1FFFFF).to(tl.int32),
        (total >> 42).to(tl.int32),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _counts(rows, lane, first, end, one, two, three, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the scores of each row that are at least as large as each of three candidates."""
    c1 = tl.zeros([rows.shape[0], CHUNK], tl.int32)
    c2 = tl.zeros([rows.shape[0], CHUNK], tl.int32)
    c3 = tl.zeros([rows.shape[0], CHUNK], tl.int32)
    for at in tl.range(first, end, CHUNK, loop_unroll_factor=4):
        x = tl.load(rows + at + lane, mask=at + lane < end, other=float("-inf"))
        x = _ordered(x)
        c1 += (x >= one[:, None]).to(tl.int32)
        c2 += (x >= two[:, None]).to(tl.int32)
        c3 += (x >= three[:, None]).to(tl.int32)
    return _packed(c1, c2, c3)


@triton.jit  # type: ignore[untyped-decorator]
def _extent(rows, lane, first, end, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The maximum of each row, how many keys are valid, and how many scores are >= 0 and > 0."""
    tops = tl.full([rows.shape[0], CHUNK], _INVALID, tl.int32)
    valid = tl.zeros([rows.shape[0], CHUNK], tl.int32)
    natural = tl.zeros([rows.shape[0], CHUNK], tl.int32)
    positive = tl.zeros([rows.shape[0], CHUNK], tl.int32)
    for at in tl.range(first, end, CHUNK, loop_unroll_factor=4):
        x = tl.load(rows + at + lane, mask=at + lane < end, other=float("-inf"))
        x = _ordered(x)
        tops = tl.maximum(tops, x)
        valid += (x > _INVALID).to(tl.int32)
        natural += (x >= 0).to(tl.int32)
        positive += (x > 0).to(tl.int32)
    one, two, three = _packed(valid, natural, positive)
    return tl.max(tops, axis=1), one, two, three


@triton.jit  # type: ignore[untyped-decorator]
def _candidates(step, low, least, high, most, want, top):  # type: ignore[no-untyped-def]
    """Three candidates strictly between the bounds, ascending.

    The first steps interpolate the threshold from the counts, as if scores were spread evenly: this
    takes about five passes over a row, where bisecting bit patterns takes eight. Later steps bisect
    the bit patterns, which ends after sixteen, whatever the scores.
    """
    two = (low & high) + ((low ^ high) >> 1)
    one = (low & two) + ((low ^ two) >> 1)
    three = (two & high) + ((two ^ high) >> 1)
    if step < _NUMBER_STEPS:
        base = tl.where(low == _INVALID + 1, -tl.abs(_number(top)), _number(low))
        spread = _number(high) - base
        part = (least - want).to(tl.float32) / tl.maximum(least - most, 1).to(tl.float32)
        aside = 0.0625
        if step == 0:
            part = tl.full(part.shape, 0.5, tl.float32)
            aside = 0.25
        one = _ordered(base + spread * tl.maximum(part - aside, 0.001))
        two = _ordered(base + spread * part)
        three = _ordered(base + spread * tl.minimum(part + aside, 0.999))
    one = tl.minimum(tl.maximum(one, low + 1), high - 1)
    two = tl.minimum(tl.maximum(two, one), high - 1)
    return one, two, tl.minimum(tl.maximum(three, two), high - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _thresholds(rows, lane, first, end, topk, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """For each row: the maximum, the number of keys to choose, the score above which all keys are
    chosen, and how many of those equal to it are."""
    top, valid, natural, positive = _extent(rows, lane, first, end, CHUNK)
    want = tl.minimum(valid, topk)
    # At least `want` scores are >= low, namely `least`; fewer are >= high, namely `most`. ReLU
    # produces exact zeros, so a plateau at the cut is common, and 0 is tried as a candidate.
    low = tl.where(positive >= want, 1, tl.where(natural >= want, 0, _INVALID + 1))
    least = tl.where(positive >= want, positive, tl.where(natural >= want, natural, valid))
    high = tl.where(positive >= want, top + 1, tl.where(natural >= want, 1, 0))
    most = tl.where(positive >= want, 0, tl.where(natural >= want, positive, natural))
    step = 0
    while tl.max(((low + 1 < high) & (least != want)).to(tl.int32), axis=0) > 0:
        one, two, three = _candidates(step, low, least, high, most, want, top)
        c1, c2, c3 = _counts(rows, lane, first, end, one, two, three, CHUNK)
        open_ = (low + 1 < high) & (least != want)
        up1, up2, up3 = (c1 >= want) & open_, (c2 >= want) & open_, (c3 >= want) & open_
        low = tl.where(up3, three, tl.where(up2, two, tl.where(up1, one, low)))
        least = tl.where(up3, c3, tl.where(up2, c2, tl.where(up1, c1, least)))
        high_1, high_2, high_3 = (c1 < want) & open_, (c2 < want) & open_, (c3 < want) & open_
        high = tl.where(high_1, one, tl.where(high_2, two, tl.where(high_3, three, high)))
        most = tl.where(high_1, c1, tl.where(high_2, c2, tl.where(high_3, c3, most)))
        step += 1
    # If exactly `want` scores reach the threshold, all of those equal to it are needed.
    return top, want, low, tl.where(least == want, 1 << 30, want - most)


@triton.jit  # type: ignore[untyped-decorator]
def _write_choice(  # type: ignore[no-untyped-def]
    rows, lane, first, end, threshold, need, want, out, there, indices, chosen, topk,
    SCORES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the chosen keys, ascending, -1 after the last, and their scores if requested."""
    above_before = tl.zeros(want.shape, tl.int32)
    equal_before = tl.zeros(want.shape, tl.int32)
    for at in range(first, end, CHUNK):
        score = tl.load(rows + at + lane, mask=at + lane < end, other=float("-inf"))
        x = _ordered(score)
        above = x > threshold[:, None]
        equal = x == threshold[:, None]
        packed = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        scan = tl.cumsum(packed, axis=1)
        equals = equal_before[:, None] + (scan >> 16)
        place = above_before[:, None] + (scan & 0xFFFF) + tl.minimum(equals, need[:, None]) - 1
        take = (above | (equal & (equals <= need[:, None]))) & (want > 0)[:, None]
        tl.store(indices + out[:, None] + place, at + lane, mask=take)
        if SCORES:
            tl.store(chosen + out[:, None] + place, score, mask=take)
        total = tl.sum(packed, axis=1)
        above_before += total & 0xFFFF
        equal_before += total >> 16
    for at in range(tl.min(want, axis=0), topk, CHUNK):
        rest = (at + lane >= want[:, None]) & (at + lane < topk) & there[:, None]
        tl.store(indices + out[:, None] + at + lane, -1, mask=rest)
        if SCORES:
            tl.store(chosen + out[:, None] + at + lane, float("-inf"), mask=rest)


@triton.jit  # type: ignore[untyped-decorator]
def _log_sum_exp(rows, lane, first, end, top, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Log of the sum of the exponentials of each row, -inf without a valid key."""
    sums = tl.zeros([rows.shape[0], CHUNK], tl.float32)
    for at in tl.range(first, end, CHUNK, loop_unroll_factor=4):
        x = tl.load(rows + at + lane, mask=at + lane < end, other=float("-inf"))
        sums += tl.where(x > float("-inf"), tl.exp(x - top[:, None]), 0.0)
    return top + tl.log(tl.sum(sums, axis=1))


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _choose_kernel(  # type: ignore[no-untyped-def]
    q, k, weights, starts, ends, scratch, indices, chosen, lse,
    batch, sq, sk, width, topk,
    q_row, q_batch, q_head, k_row, k_batch, w_row, w_batch, w_head, bound_batch, bound_row,
    HEADS: tl.constexpr, D: tl.constexpr, H_PAD: tl.constexpr, D_PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, RELU: tl.constexpr,
    CAUSAL: tl.constexpr, SCORES: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(sq, ROWS)
    own = scratch + tl.program_id(0).to(tl.int64) * ROWS * width
    row_lane = tl.arange(0, ROWS)
    column = tl.arange(0, ROWS * H_PAD)
    head = column % H_PAD
    d = tl.arange(0, D_PAD)
    lane = tl.arange(0, KEYS)
    for item in range(tl.program_id(0), blocks * batch, tl.num_programs(0)):
        b = (item % batch).to(tl.int64)
        # The longest rows of a causal mask come first, so that the last programs finish together.
        block = blocks - 1 - item // batch
        row = block * ROWS + row_lane
        inside = row < sq
        if CAUSAL:
            start = tl.zeros([ROWS], tl.int32)
            end = tl.where(inside, row + 1 + sk - sq, 0)
        else:
            at_bound = b * bound_batch + row.to(tl.int64) * bound_row
            start = tl.load(starts + at_bound, mask=inside, other=0).to(tl.int32)
            start = tl.maximum(start, 0)
            end = tl.load(ends + at_bound, mask=inside, other=0).to(tl.int32)
        end = tl.minimum(end, sk)
        start = tl.where(end > start, start, 2147483647)
        last = tl.maximum(tl.max(end, axis=0), 0)
        # Not after `last`, where no row sees a key: an unrolled loop must not run backwards.
        first = tl.minimum(tl.min(start, axis=0), last) // KEYS * KEYS
        q_at = (block * ROWS + column // H_PAD).to(tl.int64)
        there = (q_at < sq) & (head < HEADS)
        queries = tl.load(
            q + b * q_batch + (q_at * q_row + head * q_head)[None, :] + d[:, None],
            mask=there[None, :] & (d < D)[:, None],
            other=0.0,
        )
        w = tl.load(weights + b * w_batch + q_at * w_row + head * w_head, mask=there, other=0.0)
        w = w.to(tl.float32)
        for key in range(first, last, KEYS):
            at_key = key + lane
            tile = tl.load(
                k + b * k_batch + at_key.to(tl.int64)[:, None] * k_row + d[None, :],
                mask=(at_key < sk)[:, None] & (d < D)[None, :],
                other=0.0,
            )
            s = _score_tile(tile, queries, w, KEYS, ROWS, H_PAD, RELU)
            # -0.0 and 0.0 must compare equal.
            s = tl.where(s == 0.0, 0.0, s)
            valid = (at_key[:, None] >= start[None, :]) & (at_key[:, None] < end[None, :])
            s = tl.where(valid, s, float("-inf"))
            tl.store(own + row_lane[None, :] * width + at_key[:, None], s)
        tl.debug_barrier()
        rows = own + row_lane[:, None] * width
        chunk = tl.arange(0, CHUNK)[None, :]
        top, want, threshold, need = _thresholds(rows, chunk, first, last, topk, CHUNK)
        out = (b * sq + row) * topk
        _write_choice(
            rows, chunk, first, last, threshold, need, want, out, inside, indices, chosen, topk,
            SCORES, CHUNK,
        )  # fmt: skip
        if LSE:
            total = _log_sum_exp(rows, chunk, first, last, _number(top), CHUNK)
            tl.store(lse + b * sq + row, total, mask=inside)
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
        HEADS=heads, D=width, H_PAD=h_pad, D_PAD=d_pad, ROWS=rows, KEYS=launch.keys,
        CHUNK=launch.chunk, RELU=use_relu, CAUSAL=bounds.causal,
        SCORES=want_scores, LSE=want_lse, **options,
    )  # fmt: skip
    return indices, chosen, lse
