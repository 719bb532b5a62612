"""The depthwise causal convolution of packed documents, forward and backward.

A program processes a tile of tokens and channels; each tap is one more, shifted load of the tile.
The backward makes two passes over the tokens: the first computes the gradient of the sums before
SiLU, in fp32, and each tile's contribution to the gradients of weight and bias; the second goes
back along the taps to the gradient of x. There are no atomics.

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
"""The tile of a program."""

WARPS = 4


def tiles(tokens: int) -> int:
    """The number of tiles along the tokens."""
    return -(-tokens // TOKENS)


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    x, weight, bias, rows, columns, before, here, b, x_rows, C: tl.constexpr, TAPS: tl.constexpr
):
    """The sums of a tile before SiLU."""
    total = tl.load(bias + columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(TAPS):
        at = weight + columns * TAPS + (TAPS - 1 - j)
        tap = tl.load(at, mask=columns < C, other=0.0).to(tl.float32)
        at = x + (rows - j * b)[:, None] * x_rows + columns[None, :]
        seen = here & (before >= j)[:, None]
        total += tap[None, :] * tl.load(at, mask=seen, other=0.0).to(tl.float32)
    return total


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, position, out, tokens, b, x_rows, C: tl.constexpr, TAPS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (rows < tokens)[:, None] & (columns < C)[None, :]
    before = tl.load(position + rows // b, mask=rows < tokens, other=0)
    total = _sums(x, weight, bias, rows, columns, before, here, b, x_rows, C, TAPS)
    y = total / (1.0 + tl.exp(-total))
    at = out + rows[:, None] * C + columns[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=here)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _sums_gradient_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, position, gradient, d_sums, parts, tokens, b, x_rows, C: tl.constexpr,
    TAPS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (rows < tokens)[:, None] & (columns < C)[None, :]
    before = tl.load(position + rows // b, mask=rows < tokens, other=0)
    total = _sums(x, weight, bias, rows, columns, before, here, b, x_rows, C, TAPS)
    at = rows[:, None] * C + columns[None, :]
    d_y = tl.load(gradient + at, mask=here, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-total))
    d_total = d_y * sigmoid * (1.0 + total * (1.0 - sigmoid))
    tl.store(d_sums + at, d_total, mask=here)
    part = parts + tl.program_id(0).to(tl.int64) * ((TAPS + 1) * C) + columns
    for j in tl.static_range(TAPS):
        at_x = x + (rows - j * b)[:, None] * x_rows + columns[None, :]
        seen = here & (before >= j)[:, None]
        of_tap = tl.sum(d_total * tl.load(at_x, mask=seen, other=0.0).to(tl.float32), 0)
        tl.store(part + (TAPS - 1 - j) * C, of_tap, mask=columns < C)
    tl.store(part + TAPS * C, tl.sum(d_total, 0), mask=columns < C)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _input_gradient_kernel(  # type: ignore[no-untyped-def]
    d_sums, weight, position, d_x, tokens, b, C: tl.constexpr, TAPS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (rows < tokens)[:, None] & (columns < C)[None, :]
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for j in tl.static_range(TAPS):
        at = weight + columns * TAPS + (TAPS - 1 - j)
        tap = tl.load(at, mask=columns < C, other=0.0).to(tl.float32)
        later = rows + j * b
        before = tl.load(position + later // b, mask=later < tokens, other=-1)
        at = d_sums + later[:, None] * C + columns[None, :]
        total += tap[None, :] * tl.load(at, mask=here & (before >= j)[:, None], other=0.0)
    at = d_x + rows[:, None] * C + columns[None, :]
    tl.store(at, total.to(d_x.dtype.element_ty), mask=here)


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
