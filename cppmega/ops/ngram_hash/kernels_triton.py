"""Reading rows of a large table, and the sums of their gradients in a fixed order.

- `_read_kernel`: grid blocks of 128 rows. A program gathers its rows, each read and written once.
- `row_sums_kernel`: grid blocks of 32 places in the stably sorted list of rows, 16 gradients at a
  time. The caller's zeroed table is the remaining traffic.

Memory bandwidth limits both, at rows of `dim` elements that lie anywhere.

`torch.nn.functional.embedding` is the reference, except for row 0; `ngram_hash.lookup` has the same
in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.row_sums_triton import row_sums_kernel

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
        row_sums_kernel[(triton.cdiv(len(rows), PLACES), 1)](
            rows, order, gradient, out, len(rows), D=out.size(1),
            TILE=triton.next_power_of_2(out.size(1)), PLACES=PLACES, RUN=RUN, ADD=False,
            num_warps=1,
        )  # fmt: skip
