"""`rope_naive.rotated` and its gradient, with the same roundings.

Grid: blocks of tokens x blocks of heads. A program holds about `ELEMENTS` columns in registers,
reads and writes each once, in whole rows, and reads the cos and sin of a token once for its heads.
The gradient rotates pairs backwards and stores them to the columns they came from. Neighbouring
columns of pairs are read and written together, and separated in registers.

Memory bandwidth limits it: each element takes two products and a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device

ELEMENTS = 4096
"""Approximate number of columns, over all rows, that a program moves."""


def padded(columns: int) -> int:
    """The least power of two that is not below a number of columns."""
    return int(triton.next_power_of_2(max(columns, 1)))


def tile(heads: int, columns: int) -> tuple[int, int]:
    """How many tokens and heads a program has, of rows with so many columns."""
    rows = max(1, ELEMENTS // padded(columns))
    at_a_time = min(rows, padded(heads))
    return rows // at_a_time, at_a_time


@triton.jit
def copy_columns(source, target, inside, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy the first WIDTH columns of rows, of which COLUMNS is the padded number."""
    if WIDTH > 0:
        column = tl.arange(0, COLUMNS)[None, None, :]
        mask = inside & (column < WIDTH)
        tl.store(target + column, tl.load(source + column, mask=mask, other=0.0), mask=mask)


@on_its_device
@triton.jit
def _rotate_kernel(
    x, cos, sin, out, tokens, b, heads, given_s, given_b, given_h, scale,
    D: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, ADJACENT: tl.constexpr,
    GATHERED: tl.constexpr, BACKWARD: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    PAIRS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = WIDTH // 2
    kind = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    inside = (token < tokens)[:, None, None] & (head < heads)[None, :, None]
    s = token // b
    from_token = s * given_s + token % b * given_b
    from_row = x + from_token[:, None, None] + (head * given_h)[None, :, None]
    to_row = out + (token[:, None, None] * heads + head[None, :, None]) * D

    # Columns of a pair are neighbours in t, in the result, in both, or in neither.
    from_pairs: tl.constexpr = ADJACENT or (GATHERED and not BACKWARD)
    to_pairs: tl.constexpr = ADJACENT or (GATHERED and BACKWARD)
    pair = tl.arange(0, PAIRS)[None, None, :]
    turn = (s * WIDTH)[:, None, None] + (2 * pair if ADJACENT else pair)
    other: tl.constexpr = 1 if ADJACENT else HALF
    mask = (token < tokens)[:, None, None] & (pair < HALF)
    c_first = (tl.load(cos + turn, mask=mask, other=0.0) * scale).to(kind)
    c_second = (tl.load(cos + turn + other, mask=mask, other=0.0) * scale).to(kind)
    s_first = (tl.load(sin + turn, mask=mask, other=0.0) * scale).to(kind)
    s_second = (tl.load(sin + turn + other, mask=mask, other=0.0) * scale).to(kind)
    if BACKWARD:
        across_first, across_second = s_second, -s_first
    else:
        across_first, across_second = -s_first, s_second

    column = tl.arange(0, 2 * PAIRS)[None, None, :]
    both = inside & (column < WIDTH)
    half = inside & (pair < HALF)
    if from_pairs:
        whole = tl.load(from_row + START + column, mask=both, other=0.0)
        first, second = tl.split(tl.reshape(whole, (TOKENS, HEADS, PAIRS, 2)))
    else:
        first = tl.load(from_row + START + pair, mask=half, other=0.0)
        second = tl.load(from_row + START + HALF + pair, mask=half, other=0.0)
    y_first = _product(first, c_first, kind) + _product(second, across_first, kind)
    y_second = _product(second, c_second, kind) + _product(first, across_second, kind)
    if to_pairs:
        joined = tl.join(y_first.to(kind), y_second.to(kind))
        whole = tl.reshape(joined, (TOKENS, HEADS, 2 * PAIRS))
        tl.store(to_row + START + column, whole, mask=both)
    else:
        tl.store(to_row + START + pair, y_first.to(kind), mask=half)
        tl.store(to_row + START + HALF + pair, y_second.to(kind), mask=half)
    copy_columns(from_row, to_row, inside, START, BEFORE)
    END: tl.constexpr = START + WIDTH
    copy_columns(from_row + END, to_row + END, inside, D - END, AFTER)


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
    start: int,
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
        start: as in `rope_naive`.
        backward: whether `given` is a gradient.
    """
    s, b, heads, d = given.shape
    width = cos.size(-1)
    if given.numel():
        tokens, at_a_time = tile(heads, d)
        _rotate_kernel[(triton.cdiv(s * b, tokens), triton.cdiv(heads, at_a_time))](
            given, cos, sin, out, s * b, b, heads, given.stride(0), given.stride(1),
            given.stride(2), scale, D=d, START=start, WIDTH=width, ADJACENT=adjacent,
            GATHERED=gathered, BACKWARD=backward, TOKENS=tokens, HEADS=at_a_time,
            PAIRS=padded(width // 2), BEFORE=padded(start), AFTER=padded(d - start - width),
            num_warps=4,
            enable_fp_fusion=False,  # a product and the sum are rounded one after the other
        )  # fmt: skip
