"""Device functions over tiles of queries and keys: bounds, rows, products. No kernel is here."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
"""Converts exponents from base e to base 2."""


def padded(width: int) -> int:
    """The padded width of a product's operand: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(width)))


@triton.jit
def row_bounds(starts, ends, b, row, sq, sk, bound_batch, bound_row, CAUSAL: tl.constexpr):
    """The first key, and the key after the last, of each row; without keys an empty range at 0."""
    inside = row < sq
    if CAUSAL:
        start = tl.zeros(row.shape, tl.int32)
        end = tl.where(inside, row + 1 + sk - sq, 0)
    else:
        at = b * bound_batch + row.to(tl.int64) * bound_row
        start = tl.maximum(tl.load(starts + at, mask=inside, other=0).to(tl.int32), 0)
        end = tl.load(ends + at, mask=inside, other=0).to(tl.int32)
    end = tl.minimum(tl.maximum(end, 0), sk)
    return tl.where(end > start, start, 0), tl.where(end > start, end, 0)


@triton.jit
def extent(start, end):
    """The range of keys that any row of a tile sees: the first, and the one after the last."""
    first = tl.min(tl.where(end > start, start, 2147483647), axis=0)
    last = tl.max(end, axis=0)
    return tl.minimum(first, last), last


@triton.jit
def rows_of(base, row, step, inside, D: tl.constexpr, D_PAD: tl.constexpr):
    """Rows `[rows, D_PAD]` of a matrix, zero where `inside` is false."""
    offs_d = tl.arange(0, D_PAD)
    return tl.load(
        base + row.to(tl.int64)[:, None] * step + offs_d[None, :],
        mask=inside[:, None] & (offs_d < D)[None, :],
        other=0.0,
    )


@triton.jit
def product(left, right, acc, SPLIT: tl.constexpr):
    """acc + left @ right, with `left` in fp32 split into two terms in the type of `right`."""
    high = left.to(right.dtype)
    acc = tl.dot(high, right, acc, input_precision="ieee")
    if SPLIT:
        acc = tl.dot(
            (left - high.to(tl.float32)).to(right.dtype), right, acc, input_precision="ieee"
        )
    return acc
