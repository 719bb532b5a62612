"""One bit per query and key: which keys were chosen, for products of complete tiles.

`_bits_kernel` has the grid queries x batch. A program reads the indices of its query once, and sets
the bits of the keys that the query may see in zeroed memory, by one atomic or per key and layout
(by query, by key); it also marks their units of UNIT queries and keys. The order of entries does
not matter. These scattered writes limit it.
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
@triton.jit
def _bits_kernel(
    indices, starts, ends, bits, across, marks, sq, sk, topk, q0, part, rows, words, bound_batch,
    bound_row, CAUSAL: tl.constexpr, SLOTS: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr, MARKS: tl.constexpr,
):  # fmt: skip
    """Set the bit of each chosen key of one query, in zeroed memory."""
    b = (tl.program_id(0) // part).to(tl.int64)
    part_row = tl.program_id(0) % part
    row = q0 + part_row + tl.arange(0, 1)
    start, end = row_bounds(starts, ends, b, row, sq, sk, bound_batch, bound_row, CAUSAL)
    for first in range(0, topk, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        key_n = tl.load(indices + (b * sq + q0 + part_row) * topk + slot, mask=slot < topk, other=0)
        mask = (slot < topk) & (key_n >= start) & (key_n < end)
        key_n = tl.where(mask, key_n, 0).to(tl.int32)
        bit = tl.full([SLOTS], 1, tl.int32)
        if BY_QUERY:
            word = bits + (b * rows + part_row) * words + key_n // BITS
            tl.atomic_or(word, bit << (key_n % BITS), mask=mask, sem="relaxed")
        if BY_KEY:
            word = across + (b * words * BITS + key_n) * (rows // BITS) + part_row // BITS
            tl.atomic_or(word, bit << (part_row % BITS), mask=mask, sem="relaxed")
        if MARKS:
            # Other programs write the same value there.
            unit = (b * (rows // UNIT) + part_row // UNIT) * (words * BITS // UNIT) + key_n // UNIT
            tl.store(marks + unit, bit, mask=mask)


@triton.jit
def chosen(words, offs_n, BITS: tl.constexpr):
    """Which columns of a tile have their bit set, given the address of each row's first word.

    Args:
        words: `[rows]`.
        offs_n: `tl.arange(0, columns)`.
        BITS: columns per word.
    """
    # A word is loaded once per row, not once per column.
    word = tl.zeros([words.shape[0], offs_n.shape[0]], tl.int32)
    for part in tl.static_range(offs_n.shape[0] // BITS):
        word = tl.where((offs_n // BITS == part)[None, :], tl.load(words + part)[:, None], word)
    return (word & (tl.full(offs_n.shape, 1, tl.int32) << (offs_n % BITS))[None, :]) != 0


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
