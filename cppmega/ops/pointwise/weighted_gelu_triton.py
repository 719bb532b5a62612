"""`weighted_gelu_naive`: both directions in one pass over the rows.

Grid: blocks of 4 rows. A program walks along its rows in blocks of 1,024 columns, so that it alone
adds up the gradient of each weight, in a fixed order. Each element is read and written once, so
memory bandwidth limits it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device

ROWS = 4
"""Rows of a program."""

COLUMNS = 1024
"""The most columns that a program holds at once: 2 KiB of each row in 16 bits."""


@triton.jit
def _normal(x):
    """The distribution function of the normal distribution."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@on_its_device
@triton.jit
def _weighted_gelu_kernel(
    x_ptr, weights, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    weight = tl.load(weights + row, mask=row < rows, other=0.0)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        offs = row[:, None] * width + column[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        y = x * _normal(x) * weight[:, None]
        tl.store(out + offs, y.to(out.dtype.element_ty), mask=mask)


@on_its_device
@triton.jit
def _weighted_gelu_gradients_kernel(
    x_ptr, weights, do, dx_ptr, dw_ptr, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    weight = tl.load(weights + row, mask=row < rows, other=0.0)
    dw = tl.zeros((ROWS,), tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        offs = row[:, None] * width + column[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(do + offs, mask=mask, other=0.0).to(tl.float32)
        normal = _normal(x)
        dw += tl.sum(g * (x * normal), 1)
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        dx = g * weight[:, None] * (normal + x * density)
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_ptr + row, dw, mask=row < rows)


def _columns(width: int) -> int:
    return min(COLUMNS, max(16, int(triton.next_power_of_2(width))))


@torch.library.custom_op("cppmega::weighted_gelu", mutates_args=("out",))
def weigh(x: Tensor, weights: Tensor, out: Tensor) -> None:
    """Write `gelu(x) * weights`; x and out `[rows, width]`, weights fp32 `[rows, 1]`."""
    rows, width = x.shape
    if x.numel():
        _weighted_gelu_kernel[(triton.cdiv(rows, ROWS),)](
            x, weights, out, rows, width, ROWS=ROWS, COLUMNS=_columns(width), num_warps=8
        )


@torch.library.custom_op("cppmega::weighted_gelu_gradients", mutates_args=("of_x", "of_weights"))
def gradients(x: Tensor, weights: Tensor, given: Tensor, of_x: Tensor, of_weights: Tensor) -> None:
    """Write the gradients of x and of the weights, of the shapes of both, for that of the result.

    Args:
        x: `[rows, width]`.
        weights: fp32 `[rows, 1]`.
        given: `[rows, width]`, of the type of x.
        of_x: `[rows, width]`, of the type of x.
        of_weights: fp32 `[rows, 1]`.
    """
    rows, width = x.shape
    if rows:  # rows without columns have gradients of zero
        _weighted_gelu_gradients_kernel[(triton.cdiv(rows, ROWS),)](
            x, weights, given, of_x, of_weights, rows, width, ROWS=ROWS,
            COLUMNS=_columns(width), num_warps=8,
        )  # fmt: skip
