"""Sums of the gradients of rows of a table, in a fixed order.

Grid: blocks of `PLACES` places in the stably sorted list of rows x blocks of `TILE` columns. A
program sums each run of equal rows that begins in its block, `RUN` gradients at a time, in the
sorted order in fp32, and rounds once; with `ADD`, after it has added what the table holds. Each
gradient is read once, and each row that has one is written once, and no other.

Memory bandwidth limits it; a run of thousands of equal rows is one program's chain of loads, and
its latency then limits the sum. `Tensor.index_add_` is the reference, except for its order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cppmega.ops.common.launch import on_its_device


@on_its_device
@triton.jit
def row_sums_kernel(
    rows, order, do, out, count,
    D: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr, RUN: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * PLACES
    n = first + tl.arange(0, PLACES)
    d = tl.program_id(1) * TILE + tl.arange(0, TILE)
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
    if ADD:
        total = tl.load(out + offs, mask=mask, other=0.0).to(tl.float32) + tile.to(tl.float32)
        tl.store(out + offs, total.to(out.dtype.element_ty), mask=mask)
    else:
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
        if ADD:
            acc += tl.load(out + offs_run, mask=mask_d, other=0.0).to(tl.float32)
        tl.store(out + offs_run, acc.to(out.dtype.element_ty), mask=mask_d)
        next_run = tl.min(tl.where(begins & (row == after) & (n > next_run), n, count))
