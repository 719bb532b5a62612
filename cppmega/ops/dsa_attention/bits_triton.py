"""Which tiles of queries and keys the attention with a key per head multiplies, and their bits.

The bits of a query's keys are adjacent; for the gradients of keys, a second copy has the bits of a
key's queries adjacent. Marks record which units of 32 queries by 32 keys have a bit set; from them,
a list is built for each tile of the tiles with which it shares a set bit.

`_lists_kernel` has the grid tiles x batch. A program reads the marks of its tile once, CHUNK
candidates at a time, and writes one list and its length. Its loop over the chunks is serial, and
there is one mark per 1024 pairs of a query and a key: latency limits it, not memory bandwidth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.bits_triton import UNIT, Places, set_bits
from cppmega.ops.common.bounds import RowBounds
from cppmega.ops.common.launch import on_its_device

WHOLE = 128
"""Rows and columns of the bits are multiples of this, so that they are read without a mask."""

CHUNK = 256
"""Candidate tiles that are examined at a time while a list is built."""


@on_its_device
@triton.jit
def _lists_kernel(
    marks, lists, counts, own, other, batch_step, own_step, other_step,
    OWN: tl.constexpr, OTHER: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """List, for one tile, the tiles along the other dimension that share a set bit, in order."""
    b, tile = (tl.program_id(0) // own).to(tl.int64), tl.program_id(0) % own
    marks += b * batch_step + tile * OWN * own_step
    lists += tl.program_id(0).to(tl.int64) * (other + 1)
    count = 0
    for first in range(0, other, CHUNK):
        offs = first + tl.arange(0, CHUNK)
        mark = tl.zeros([CHUNK], tl.int32)
        for i in tl.static_range(OWN):
            for j in tl.static_range(OTHER):
                unit = marks + i * own_step + (offs * OTHER + j) * other_step
                mark |= tl.load(unit, mask=offs < other, other=0)
        tl.store(lists + count + tl.cumsum(mark, axis=0) - mark, offs, mask=mark != 0)
        count += tl.sum(mark, axis=0)
    tl.store(counts + tl.program_id(0), count)


class Lists(NamedTuple):
    """For each tile of one dimension, the tiles of the other with which it is multiplied.

    Attributes:
        tiles: `[b, tiles, other tiles + 1]`, in ascending order; a program reads one step ahead.
        counts: the number of valid entries of a row, `[b, tiles]`.
    """

    tiles: Tensor
    counts: Tensor


class Bits:
    """The bits of a part's queries.

    Args:
        indices: `[b, sq, topk]`, contiguous.
        sk: the number of keys.
        part: first query, and the query after the last.
        bounds: which keys a query may see.
        across: whether the bits are also needed by key.
    """

    def __init__(
        self, indices: Tensor, sk: int, part: tuple[int, int], bounds: RowBounds, *, across: bool
    ) -> None:
        self.part, self.batch = part, indices.size(0)
        self.rows = triton.cdiv(part[1] - part[0], WHOLE) * WHOLE
        self.columns = triton.cdiv(sk, WHOLE) * WHOLE
        units = self.rows * self.columns // UNIT
        sizes = [units, units if across else 0, units // UNIT]
        zeros = indices.new_zeros(self.batch * sum(sizes), dtype=torch.int32)
        ends = [self.batch * sum(sizes[:count]) for count in (1, 2)]
        self.by_query, self.by_key, self.marks = zeros.tensor_split(ends)
        wanted = Places(self.by_query, self.by_key if across else None, self.marks)
        shape = (self.rows, self.columns)
        set_bits(indices, sk, part, bounds, wanted, bits=UNIT, shape=shape)

    def lists(self, own: int, other: int, *, of_keys: bool) -> Lists:
        """The lists of tiles that have a bit set.

        Args:
            own: rows of a program's tile: queries, or with `of_keys` keys.
            other: rows of the tiles in its list: keys, or with `of_keys` queries.
            of_keys: list the tiles of queries for each tile of keys.
        """
        units = (self.rows // UNIT, self.columns // UNIT)
        steps = (units[1], 1)
        sizes = (self.rows // own, self.columns // other)
        if of_keys:
            steps, sizes = (1, units[1]), (self.columns // own, self.rows // other)
        tiles = self.marks.new_empty(self.batch, sizes[0], sizes[1] + 1)
        counts = self.marks.new_empty(self.batch, sizes[0])
        _lists_kernel[(self.batch * sizes[0],)](
            self.marks, tiles, counts, *sizes, units[0] * units[1], *steps,
            OWN=own // UNIT, OTHER=other // UNIT, CHUNK=CHUNK,
        )  # fmt: skip
        return Lists(tiles, counts)
