"""The gradient of an embedding's rows, added to the fp32 or 16-bit sum of earlier gradients.

- `row_sums_kernel`: grid blocks of 16 places in the stably sorted list of rows x blocks of 512
  columns, 32 gradients of a run at a time.

Memory bandwidth limits it: each gradient is read once, each row that has one is read and written
once. `Tensor.index_add_` is the reference.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from cppmega.ops.common.row_sums_triton import row_sums_kernel

PLACES = 16
"""Sorted rows per program, which adds the runs that begin among them."""

RUN = 32
"""Gradients of one run that a program adds per step."""

COLUMNS = 512
"""Columns per program: 1 KiB of a gradient in 16 bits."""


@torch.library.custom_op("cppmega::embedding_rows_add", mutates_args=("total",))
def add(rows: Tensor, order: Tensor, gradient: Tensor, total: Tensor) -> None:
    """Add the sum of the gradients of each row to `total` `[count, D]`, in place, rounded once.

    Args:
        rows: int32 `[n]`, ascending, numbered from 1; 0 has no gradient.
        order: int64 `[n]`, where the gradient of each is.
        gradient: `[n, D]`, contiguous.
        total: `[count, D]`, contiguous.
    """
    if gradient.numel():
        dim = total.size(1)
        tile = min(triton.next_power_of_2(dim), COLUMNS)
        row_sums_kernel[(triton.cdiv(len(rows), PLACES), triton.cdiv(dim, tile))](
            rows, order, gradient, total, len(rows), D=dim, TILE=tile, PLACES=PLACES, RUN=RUN,
            ADD=True, num_warps=4,
        )  # fmt: skip
