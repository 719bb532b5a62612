"""One bit per query and key: which keys were chosen, for products of complete tiles.

The bits of the keys that a query chose and may see are set by atomic or in zeroed memory, so the
order of entries does not matter.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.bounds import RowBounds
from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.tiles_triton import padded, row_bounds

UNIT = 32
"""Queries and keys covered by one mark."""

SLOTS = 1024
"""Maximum number of a query's entries that are read at a time."""


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _bits_kernel(  # type: ignore[no-untyped-def]
    indices, starts, ends, bits, across, marks, sq, sk, topk, q0, part, rows, words, bound_batch,
    bound_row, CAUSAL: tl.constexpr, SLOTS: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr, MARKS: tl.constexpr,
):  # fmt: skip
    """Set the bit of each chosen key of one query, in zeroed memory."""
    b = (tl.program_id(0) // part).to(tl.int64)
    near = tl.program_id(0) % part
    row = q0 + near + tl.arange(0, 1)
    start, end = row_bounds(starts, ends, b, row, sq, sk, bound_batch, bound_row, CAUSAL)
    for first in range(0, topk, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        at = tl.load(indices + (b * sq + q0 + near) * topk + slot, mask=slot < topk, other=0)
        there = (slot < topk) & (at >= start) & (at < end)
        at = tl.where(there, at, 0).to(tl.int32)
        one = tl.full([SLOTS], 1, tl.int32)
        if BY_QUERY:
            word = bits + (b * rows + near) * words + at // BITS
            tl.atomic_or(word, one << (at % BITS), mask=there, sem="relaxed")
        if BY_KEY:
            word = across + (b * words * BITS + at) * (rows // BITS) + near // BITS
            tl.atomic_or(word, one << (near % BITS), mask=there, sem="relaxed")
        if MARKS:
            # Other programs write the same value there.
            unit = (b * (rows // UNIT) + near // UNIT) * (words * BITS // UNIT) + at // UNIT
            tl.store(marks + unit, one, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def chosen(words, lane, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which columns of a tile have their bit set, given the address of each row's first word.

    Args:
        words: `[rows]`.
        lane: `tl.arange(0, columns)`.
        BITS: columns per word.
    """
    # A word is loaded once per row, not once per column.
    word = tl.zeros([words.shape[0], lane.shape[0]], tl.int32)
    for part in tl.static_range(lane.shape[0] // BITS):
        word = tl.where((lane // BITS == part)[None, :], tl.load(words + part)[:, None], word)
    return (word & (tl.full(lane.shape, 1, tl.int32) << (lane % BITS))[None, :]) != 0


class Places(NamedTuple):
    """Where bits are set: `[b, queries, words]`, `[b, keys, words]`, and one mark per unit."""

    by_query: Tensor | None
    by_key: Tensor | None = None
    marks: Tensor | None = None


def set_bits(
    indices: Tensor,
    sk: int,
    part: tuple[int, int],
    bounds: RowBounds,
    places: Places,
    *,
    bits: int,
    shape: tuple[int, int],
) -> None:
    """Set the bits of the keys that a part's queries chose and may see, in zeroed memory.

    Args:
        indices: `[b, sq, topk]`, contiguous, of any integer type.
        sk: the number of keys.
        part: first query, and the query after the last.
        bounds: which keys a query may see.
        places: where to set bits.
        bits: bits per word.
        shape: rows and columns of the bits.
    """
    batch, sq, topk = indices.shape
    queries, (rows, columns) = part[1] - part[0], shape
    by_query, by_key, marks = (indices if x is None else x for x in places)
    _bits_kernel[(batch * queries,)](
        indices, bounds.starts, bounds.ends, by_query, by_key, marks,
        sq, sk, topk, part[0], queries, rows, columns // bits, *bounds.strides,
        CAUSAL=bounds.causal, SLOTS=min(SLOTS, padded(topk)), BITS=bits, UNIT=UNIT,
        BY_QUERY=places.by_query is not None, BY_KEY=places.by_key is not None,
        MARKS=places.marks is not None,
    )  # fmt: skip
