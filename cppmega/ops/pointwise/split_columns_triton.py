"""Copies of `[s, b, width]` between tensors whose rows are contiguous, in any order of s and b.

Grid: blocks of 8 rows x blocks of 512 columns; a program holds one block. Each element is read and
written once, in pieces of complete rows, so memory bandwidth limits it. `Tensor.copy_` is the
reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device

ROWS = 8
"""Rows that a program copies."""

COLUMNS = 512
"""Columns that a program copies: 1 KiB of each row in 16 bits."""


@on_its_device
@triton.jit
def _copy_kernel(
    part, out, rows, inner, width, part_s, part_b, out_s, out_b,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    s, b = row // inner, row % inner
    source = part + (s * part_s + b * part_b)[:, None] + column[None, :]
    target = out + (s * out_s + b * out_b)[:, None] + column[None, :]
    tl.store(target, tl.load(source, mask=mask, other=0.0), mask=mask)


@torch.library.custom_op("cppmega::copy_columns", mutates_args=("out",))
def copy(part: Tensor, out: Tensor) -> None:
    """Copy `part` to `out`, both `[s, b, width]`, of one type, with a last stride of 1."""
    s, b, width = part.shape
    if part.numel():
        _copy_kernel[(triton.cdiv(s * b, ROWS), triton.cdiv(width, COLUMNS))](
            part, out, s * b, b, width, part.stride(0), part.stride(1), out.stride(0),
            out.stride(1), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
