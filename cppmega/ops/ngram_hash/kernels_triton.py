"""Reading rows of a large table, and the sums of their gradients in a fixed order.

- `_read_kernel`: grid blocks of 128 rows. A program gathers its rows, each read and written once.
- `_sum_kernel`: grid blocks of 32 places in the stably sorted list of rows. A program sums each run
  of equal rows that begins in its block, 16 gradients at a time, in the sorted order in fp32, and
  rounds once. Each gradient is read once, each row that was read is written once, and no other:
  the caller's zeroed table is the remaining traffic.

Memory bandwidth limits both, at rows of `dim` elements that lie anywhere; a run of thousands of
equal rows is one program's chain of loads, and its latency then limits the sum.

`torch.nn.functional.embedding` is the reference, except for row 0; `ngram_hash.lookup` has the same
in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device

BLOCK = 128
"""Rows per program of the read."""

PLACES = 32
"""Sorted rows per program of the sum, which sums the runs that begin among them."""

RUN = 16
"""Gradients of one run that a program adds per step."""


@on_its_device
@triton.jit
def _read_kernel(
    tables, rows, out, count, D: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, TILE)
    row = tl.load(rows + n, mask=n < count, other=0)
    mask_d = (d < D)[None, :]
    tile = tl.load(
        tables + (row - 1)[:, None] * D + d[None, :], mask=(row > 0)[:, None] & mask_d, other=0.0
    )
    tl.store(out + n[:, None] * D + d[None, :], tile, mask=(n < count)[:, None] & mask_d)


@on_its_device
@triton.jit
def _sum_kernel(
    rows, order, do, out, count,
    D: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * PLACES
    n = first + tl.arange(0, PLACES)
    d = tl.arange(0, TILE)
    mask_d = d < D
    row = tl.load(rows + n, mask=n < count, other=0)
    before = tl.load(rows + n - 1, mask=(n > 0) & (n < count), other=0)
    after = tl.load(rows + n + 1, mask=n + 1 < count, other=0)
    begins = (row > 0) & (row != before)

    alone = begins & (row != after)  # most rows: copied together, as there is nothing to add
    only = tl.load(order + n, mask=alone, other=0)
    mask = alone[:, None] & mask_d[None, :]
    tile = tl.load(do + only[:, None] * D + d[None, :], mask=mask, other=0.0)
    offs = (row - 1).to(tl.int64)[:, None] * D + d[None, :]
    tl.store(out + offs, tile.to(out.dtype.element_ty), mask=mask)

    next_run = tl.min(tl.where(begins & (row == after), n, count))
    while next_run < count:
        run_row = tl.load(rows + next_run)
        acc = tl.zeros((TILE,), tl.float32)
        m = next_run + tl.arange(0, RUN)
        left = RUN
        while left == RUN:
            equal = tl.load(rows + m, mask=m < count, other=0) == run_row
            source = tl.load(order + m, mask=equal, other=0)
            do_tile = tl.load(
                do + source[:, None] * D + d[None, :],
                mask=equal[:, None] & mask_d[None, :],
                other=0.0,
            )
            acc += tl.sum(do_tile.to(tl.float32), 0)
            left = tl.sum(equal.to(tl.int32))
            m += RUN
        offs_run = tl.cast(run_row - 1, tl.int64) * D + d
        tl.store(out + offs_run, acc.to(out.dtype.element_ty), mask=mask_d)
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
