"""Reading rows of a large table, and the sums of their gradients in a fixed order.

The gradient sorts the rows that were read, stably. A program adds each run of equal ones that
begins in its part, in that order in fp32, and rounds once. No other row of the gradient is written,
so the table that the caller has zeroed is all that it costs beside what was read.

`torch.nn.functional.embedding` is the definition, row 0 aside; `ngram_hash.lookup` has it in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device

BLOCK = 128
"""Rows that a program reads."""

PLACES = 32
"""Sorted rows of which a program sums the runs that begin among them."""

RUN = 16
"""Gradients of one row that a program adds at a time."""


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(  # type: ignore[no-untyped-def]
    tables, rows, out, count, D: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, TILE)
    row = tl.load(rows + n, mask=n < count, other=0)
    has_d = (d < D)[None, :]
    read = tl.load(
        tables + (row - 1)[:, None] * D + d[None, :], mask=(row > 0)[:, None] & has_d, other=0.0
    )
    tl.store(out + n[:, None] * D + d[None, :], read, mask=(n < count)[:, None] & has_d)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    rows, order, gradient, out, count,
    D: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * PLACES
    n = first + tl.arange(0, PLACES)
    d = tl.arange(0, TILE)
    has_d = d < D
    row = tl.load(rows + n, mask=n < count, other=0)
    before = tl.load(rows + n - 1, mask=(n > 0) & (n < count), other=0)
    after = tl.load(rows + n + 1, mask=n + 1 < count, other=0)
    begins = (row > 0) & (row != before)

    alone = begins & (row != after)  # most rows: copied together, as there is nothing to add
    only = tl.load(order + n, mask=alone, other=0)
    has = alone[:, None] & has_d[None, :]
    copied = tl.load(gradient + only[:, None] * D + d[None, :], mask=has, other=0.0)
    targets = (row - 1).to(tl.int64)[:, None] * D + d[None, :]
    tl.store(out + targets, copied.to(out.dtype.element_ty), mask=has)

    next_run = tl.min(tl.where(begins & (row == after), n, count))
    while next_run < count:
        of_run = tl.load(rows + next_run)
        sums = tl.zeros((TILE,), tl.float32)
        m = next_run + tl.arange(0, RUN)
        left = RUN
        while left == RUN:
            equal = tl.load(rows + m, mask=m < count, other=0) == of_run
            place = tl.load(order + m, mask=equal, other=0)
            values = tl.load(
                gradient + place[:, None] * D + d[None, :],
                mask=equal[:, None] & has_d[None, :],
                other=0.0,
            )
            sums += tl.sum(values.to(tl.float32), 0)
            left = tl.sum(equal.to(tl.int32))
            m += RUN
        at = tl.cast(of_run - 1, tl.int64) * D + d
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=has_d)
        next_run = tl.min(tl.where(begins & (row == after) & (n > next_run), n, count))


@torch.library.custom_op("cppmega::table_rows_read", mutates_args=("out",))
def read(tables: Tensor, rows: Tensor, out: Tensor) -> None:
    """Write the rows of `tables` `[count, D]` that `rows` `[n]` numbers from 1 into `out` `[n, D]`.

    Row 0 reads as zeros. Everything is contiguous.
    """
    if out.numel():
        _read_kernel[(triton.cdiv(len(rows), BLOCK),)](
            tables, rows, out, len(rows), D=tables.size(1),
            TILE=triton.next_power_of_2(tables.size(1)), BLOCK=BLOCK,
        )  # fmt: skip


@torch.library.custom_op("cppmega::table_rows_sum", mutates_args=("out",))
def add(rows: Tensor, order: Tensor, gradient: Tensor, out: Tensor) -> None:
    """Write the sum of the gradients of each row into `out` `[count, D]`; others are not written.

    Args:
        rows: int32 `[n]`, ascending; 0 has no gradient.
        order: int64 `[n]`, where the gradient of each is.
        gradient: `[n, D]`, contiguous.
        out: `[count, D]`, contiguous.
    """
    if gradient.numel():
        _sum_kernel[(triton.cdiv(len(rows), PLACES),)](
            rows, order, gradient, out, len(rows), D=out.size(1),
            TILE=triton.next_power_of_2(out.size(1)), PLACES=PLACES, RUN=RUN, num_warps=1,
        )  # fmt: skip
