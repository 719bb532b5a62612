"""Tensors `[s, b, ...]` as rows, one of each token, at one constant distance in memory."""

from __future__ import annotations

from torch import Tensor


def row_stride(x: Tensor) -> int:
    """Elements from one row of `[s, b, ...]` to the next.

    A dimension of one element may have any stride, which `contiguous` leaves as it is: that of b
    says nothing about the rows of a single sequence.
    """
    return x.stride(0) if x.size(1) == 1 else x.stride(1)


def with_rows(x: Tensor) -> Tensor:
    """`[s, b, D]` whose s * b rows have one constant stride, as in a slice of columns."""
    is_rows = x.stride(-1) == 1 and x.stride(0) == x.size(1) * row_stride(x)
    return x if is_rows else x.contiguous()
