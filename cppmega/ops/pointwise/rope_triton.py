"""`rope_naive.rotated` and its gradient, with the same roundings.

Grid: blocks of rows, one row per token and head. A program holds about 2,048 pairs of columns in
registers. It reads and writes each element once; the cos and sin of a token are read once per head,
from cache. The gradient rotates pairs backwards and stores them to the columns they came from.

Memory bandwidth limits it: each element takes two products and a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device

ELEMENTS = 2048
"""Approximate number of pairs that a program rotates."""


@on_its_device
@triton.jit
def _rotate_kernel(
    x, cos, sin, out, rows, b, heads, given_s, given_b, given_h, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, ADJACENT: tl.constexpr, GATHERED: tl.constexpr,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = WIDTH // 2
    kind = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    s = row // (b * heads)
    from_row = x + s * given_s + row // heads % b * given_b + row % heads * given_h
    to_row = out + row * D
    pair = tl.arange(0, PAIRS)
    mask = (row < rows)[:, None] & (pair < HALF)[None, :]
    # Columns of a pair in t, and in the result.
    t_first = 2 * pair if ADJACENT or GATHERED else pair
    t_second = t_first + 1 if ADJACENT or GATHERED else pair + HALF
    r_first = 2 * pair if ADJACENT else pair
    r_second = r_first + 1 if ADJACENT else pair + HALF

    turn = s[:, None] * WIDTH
    c_first = (tl.load(cos + turn + r_first[None, :], mask=mask, other=0.0) * scale).to(kind)
    c_second = (tl.load(cos + turn + r_second[None, :], mask=mask, other=0.0) * scale).to(kind)
    s_first = (tl.load(sin + turn + r_first[None, :], mask=mask, other=0.0) * scale).to(kind)
    s_second = (tl.load(sin + turn + r_second[None, :], mask=mask, other=0.0) * scale).to(kind)
    if BACKWARD:
        x_first, x_second, y_first, y_second = r_first, r_second, t_first, t_second
        across_first, across_second = s_second, -s_first
    else:
        x_first, x_second, y_first, y_second = t_first, t_second, r_first, r_second
        across_first, across_second = -s_first, s_second
    first = tl.load(from_row[:, None] + x_first[None, :], mask=mask, other=0.0)
    second = tl.load(from_row[:, None] + x_second[None, :], mask=mask, other=0.0)
    y = _product(first, c_first, kind).to(tl.float32) + _product(second, across_first, kind)
    tl.store(to_row[:, None] + y_first[None, :], y.to(kind), mask=mask)
    y = _product(second, c_second, kind).to(tl.float32) + _product(first, across_second, kind)
    tl.store(to_row[:, None] + y_second[None, :], y.to(kind), mask=mask)
    if D > WIDTH:
        column = WIDTH + tl.arange(0, KEPT)
        mask_kept = (row < rows)[:, None] & (column < D)[None, :]
        copied = tl.load(from_row[:, None] + column[None, :], mask=mask_kept, other=0.0)
        tl.store(to_row[:, None] + column[None, :], copied, mask=mask_kept)


@triton.jit
def _product(x, y, kind: tl.constexpr):
    """Rounded to the type of both, then fp32."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(kind).to(tl.float32)


@torch.library.custom_op("cppmega::rope", mutates_args=("out",))
def rotate(
    given: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    adjacent: bool,
    gathered: bool,
    scale: float,
    backward: bool,
) -> None:
    """Rotate `given` into `out`, or the gradient of the result into that of what was rotated.

    Args:
        given: `[s, b, heads, d]` with a last stride of 1.
        cos: fp32 `[s, 1, 1, r]`, contiguous, before the scale and any rounding.
        sin: as `cos`.
        out: `[s, b, heads, d]`, contiguous, of the type of `given`.
        adjacent: as in `rope_naive`.
        gathered: as in `rope_naive`.
        scale: as in `rope_naive`.
        backward: whether `given` is a gradient.
    """
    s, b, heads, d = given.shape
    width = cos.size(-1)
    pairs = triton.next_power_of_2(max(width // 2, 1))
    at_a_time = max(1, ELEMENTS // pairs)
    if given.numel():
        _rotate_kernel[(triton.cdiv(s * b * heads, at_a_time),)](
            given, cos, sin, out, s * b * heads, b, heads, given.stride(0), given.stride(1),
            given.stride(2), scale, D=d, WIDTH=width, ADJACENT=adjacent, GATHERED=gathered,
            BACKWARD=backward, ROWS=at_a_time, PAIRS=pairs,
            KEPT=triton.next_power_of_2(max(d - width, 1)), num_warps=4,
            enable_fp_fusion=False,  # a product and the sum are rounded one after the other
        )  # fmt: skip
