"""The depthwise causal convolution of packed documents, forward and backward.

Grid: blocks of 32 tokens x blocks of 64 channels. A program holds one tile of sums in fp32; each
tap is one more, shifted load of the tile, from L1 or L2 after the first, so that x is read from HBM
once and y is written once. The backward makes two passes: the first reads x and dO, and writes the
gradient of the sums before SiLU, in fp32, and each tile's contribution to the gradients of weight
and bias; the second correlates the former with the taps to the gradient of x. There are no atomics.

A few operations per element leave memory bandwidth as the limit; the fp32 gradient of the sums is
more than half of the backward's traffic with 16-bit tensors. Tiles have not been tuned on a GPU.

`cppmega.ops.packed_conv.naive` is the reference implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.rows import row_stride

TOKENS, COLUMNS = 32, 64
"""Tokens and channels per program."""

WARPS = 4


def tiles(tokens: int) -> int:
    """The number of tiles along the tokens."""
    return -(-tokens // TOKENS)


@triton.jit
def _sums(
    x, weight, bias, rows, columns, before, mask, b, x_rows, C: tl.constexpr, TAPS: tl.constexpr
):
    """The sums of a tile before SiLU."""
    acc = tl.load(bias + columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(TAPS):
        ptrs = weight + columns * TAPS + (TAPS - 1 - j)
        tap = tl.load(ptrs, mask=columns < C, other=0.0).to(tl.float32)
        ptrs = x + (rows - j * b)[:, None] * x_rows + columns[None, :]
        mask_j = mask & (before >= j)[:, None]
        acc += tap[None, :] * tl.load(ptrs, mask=mask_j, other=0.0).to(tl.float32)
    return acc


@on_its_device
@triton.jit
def _forward_kernel(
    x, weight, bias, position, out, tokens, b, x_rows, C: tl.constexpr, TAPS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < tokens)[:, None] & (columns < C)[None, :]
    before = tl.load(position + rows // b, mask=rows < tokens, other=0)
    acc = _sums(x, weight, bias, rows, columns, before, mask, b, x_rows, C, TAPS)
    y = acc / (1.0 + tl.exp(-acc))
    ptrs = out + rows[:, None] * C + columns[None, :]
    tl.store(ptrs, y.to(out.dtype.element_ty), mask=mask)


@on_its_device
@triton.jit
def _sums_gradient_kernel(
    x, weight, bias, position, do, d_sums, parts, tokens, b, x_rows, C: tl.constexpr,
    TAPS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < tokens)[:, None] & (columns < C)[None, :]
    before = tl.load(position + rows // b, mask=rows < tokens, other=0)
    acc = _sums(x, weight, bias, rows, columns, before, mask, b, x_rows, C, TAPS)
    offs = rows[:, None] * C + columns[None, :]
    dy = tl.load(do + offs, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-acc))
    dacc = dy * sigmoid * (1.0 + acc * (1.0 - sigmoid))
    tl.store(d_sums + offs, dacc, mask=mask)
    p_part = parts + tl.program_id(0).to(tl.int64) * ((TAPS + 1) * C) + columns
    for j in tl.static_range(TAPS):
        ptrs = x + (rows - j * b)[:, None] * x_rows + columns[None, :]
        mask_j = mask & (before >= j)[:, None]
        dw = tl.sum(dacc * tl.load(ptrs, mask=mask_j, other=0.0).to(tl.float32), 0)
        tl.store(p_part + (TAPS - 1 - j) * C, dw, mask=columns < C)
    tl.store(p_part + TAPS * C, tl.sum(dacc, 0), mask=columns < C)


@on_its_device
@triton.jit
def _input_gradient_kernel(
    d_sums, weight, position, d_x, tokens, b, C: tl.constexpr, TAPS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < tokens)[:, None] & (columns < C)[None, :]
    acc = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for j in tl.static_range(TAPS):
        ptrs = weight + columns * TAPS + (TAPS - 1 - j)
        tap = tl.load(ptrs, mask=columns < C, other=0.0).to(tl.float32)
        later = rows + j * b
        before = tl.load(position + later // b, mask=later < tokens, other=-1)
        ptrs = d_sums + later[:, None] * C + columns[None, :]
        acc += tap[None, :] * tl.load(ptrs, mask=mask & (before >= j)[:, None], other=0.0)
    ptrs = d_x + rows[:, None] * C + columns[None, :]
    tl.store(ptrs, acc.to(d_x.dtype.element_ty), mask=mask)


def _grid(x: Tensor) -> tuple[int, int]:
    s, b, c = x.shape
    return tiles(s * b), triton.cdiv(c, COLUMNS)


@torch.library.custom_op("cppmega::packed_conv", mutates_args=("out",))
def forward(x: Tensor, weight: Tensor, bias: Tensor, position: Tensor, out: Tensor) -> None:
    """Convolve `[s, b, C]`, whose rows have a constant stride, into `out`."""
    s, b, c = x.shape
    if x.numel():
        _forward_kernel[_grid(x)](
            x, weight, bias, position, out, s * b, b, row_stride(x),
            C=c, TAPS=weight.size(1), TOKENS=TOKENS, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip


@torch.library.custom_op("cppmega::packed_conv_backward", mutates_args=("d_sums", "parts", "d_x"))
def backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    position: Tensor,
    gradient: Tensor,
    d_sums: Tensor,
    parts: Tensor,
    d_x: Tensor,
) -> None:
    """Write the gradients, from a contiguous gradient of the result.

    Args:
        d_sums: fp32 `[s, b, C]`, the gradient of the sums before SiLU.
        parts: fp32 `[tiles, taps + 1, C]`, each tile's part of the taps' and the bias's gradients.
        d_x: `[s, b, C]`.
    """
    s, b, c = x.shape
    if not x.numel():
        return
    sizes = {"C": c, "TAPS": weight.size(1), "TOKENS": TOKENS, "COLUMNS": COLUMNS}
    _sums_gradient_kernel[_grid(x)](
        x, weight, bias, position, gradient, d_sums, parts, s * b, b, row_stride(x),
        **sizes, num_warps=WARPS,
    )  # fmt: skip
    _input_gradient_kernel[_grid(x)](
        d_sums, weight, position, d_x, s * b, b, **sizes, num_warps=WARPS
    )
