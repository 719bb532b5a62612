"""Which keys a query of sparse attention may see: as a caller states it, and as kernels read it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Bounds(NamedTuple):
    """Which keys a query may see.

    Attributes:
        starts: first key of a row, `[sq]` or `[b, sq]`; None for both is causal.
        ends: the key after the last one of a row.
    """

    starts: Tensor | None = None
    ends: Tensor | None = None


class RowBounds(NamedTuple):
    """The bounds of all rows as arguments of a kernel, in any layout.

    Attributes:
        starts: first key of a row, in the shape that the strides describe.
        ends: the key after the last one of a row.
        strides: the strides of both, by batch and row.
        causal: the bounds are not read; a row sees the keys up to its own.
    """

    starts: Tensor
    ends: Tensor
    strides: tuple[int, int]
    causal: bool

    @classmethod
    def of(
        cls, starts: Tensor | None, ends: Tensor | None, batch: int, sq: int, like: Tensor
    ) -> RowBounds:
        """Bounds `[sq]` or `[b, sq]` of integers; causal, with any tensor in their place, if one of
        them is None."""
        if starts is None or ends is None:
            return cls(like, like, (0, 0), True)
        starts, ends = (x.expand(batch, sq) for x in (starts, ends))
        if starts.stride() != ends.stride():
            starts, ends = starts.contiguous(), ends.contiguous()
        return cls(starts, ends, strides_of(starts), False)


def strides_of(rows: Tensor | None) -> tuple[int, int]:
    """The strides of `[b, sq]`, by batch and row; those of nothing that is read for None."""
    return (0, 0) if rows is None else (rows.stride(0), rows.stride(1))
