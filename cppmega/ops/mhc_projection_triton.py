"""The projection of all streams of a token to the n * n + 2 * n logits, and their sum of squares.

A skinny product: the streams are read once, and the few output columns are padded to what the
tensor cores take; the first column of the padding carries the sum of squares. Programs split the
columns of the streams as well as the tokens, and what they found is added in one order by
`mhc_weights_triton`. Errors are those of fp32: bf16 streams are multiplied by phi in three parts
of bf16, which together are phi, others by TF32 in three terms.

`cppmega.ops.mhc_reference.logits` contains the plain form.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 128
"""Tokens of one program; on an H200 faster than 32 and 64, with either number of warps."""

PROGRAMS = 1024
"""Few tokens are split by columns until there are this many programs."""

WARPS = 4

# The interpreter has no product of bf16.
PART = tl.constexpr(tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16)


def padded(n: int) -> int:
    """Columns of the padded logits, of which one is left for the sum of squares."""
    return max(16, int(triton.next_power_of_2(n * n + 2 * n + 1)))


def columns_of(n: int) -> int:
    """Columns of the streams in one step: less where the logits are many."""
    return 64 if n < 8 else 32


@triton.jit  # type: ignore[untyped-decorator]
def product(left, right, sums, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """`sums + left @ right`, where the right or the left ("right", "left") is exact in bf16.

    Otherwise (EXACT is "") both are fp32, or fp16, which TF32 has the bits for.

    A tensor core truncates where it adds to its accumulator. In a long chain the losses, all
    towards zero, become a factor that every product shares, which no sum over tokens averages out:
    -7e-7 after 256 columns, far more than the rounding of fp32, and in proportion to their number.
    So the tensor core only adds up one step, beginning at zero, from the smallest part on; what it
    found is added to `sums` outside of it and rounded to nearest. Triton does so with TF32.
    """
    if EXACT == "right":
        high = left.to(PART)
        rest = left - high.to(tl.float32)
        middle = rest.to(PART)
        low = (rest - middle.to(tl.float32)).to(PART)
        step = tl.dot(low, right.to(PART))
        step = tl.dot(middle, right.to(PART), step)
        return sums + tl.dot(high, right.to(PART), step)
    if EXACT == "left":
        high = right.to(PART)
        rest = right - high.to(tl.float32)
        middle = rest.to(PART)
        low = (rest - middle.to(tl.float32)).to(PART)
        step = tl.dot(left.to(PART), low)
        step = tl.dot(left.to(PART), middle, step)
        return sums + tl.dot(left.to(PART), high, step)
    return tl.dot(left.to(tl.float32), right.to(tl.float32), sums, input_precision="tf32x3")


@triton.jit  # type: ignore[untyped-decorator]
def _projection_kernel(  # type: ignore[no-untyped-def]
    streams, phi, parts, tokens, each, K: tl.constexpr, V: tl.constexpr, PADDED: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    v = tl.arange(0, PADDED)
    first = tl.program_id(1) * each
    sums = tl.zeros((TOKENS, PADDED), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for begin in range(first, tl.minimum(first + each, K), COLUMNS):
        k = begin + tl.arange(0, COLUMNS)
        inside = k < K
        at = token[:, None] * K + k[None, :]
        x = tl.load(streams + at, mask=here[:, None] & inside[None, :], other=0.0)
        known = (v < V)[None, :] & inside[:, None]
        w = tl.load(phi + v.to(tl.int64)[None, :] * K + k[:, None], mask=known, other=0.0)
        sums = product(x, w, sums, EXACT)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    sums = tl.where((v == V)[None, :], squares[:, None], sums)
    row = tl.program_id(1).to(tl.int64) * tokens + token
    tl.store(parts + row[:, None] * PADDED + v[None, :], sums, mask=here[:, None])


def split(tokens: int, n: int, c: int) -> tuple[int, int]:
    """Into how many parts the columns are split, and the columns of each part."""
    step = columns_of(n)
    wanted = triton.cdiv(PROGRAMS, max(1, triton.cdiv(tokens, TOKENS)))
    steps = triton.cdiv(n * c, step)
    each = max(4, triton.cdiv(steps, wanted)) * step
    return triton.cdiv(n * c, each), each


@torch.library.custom_op("cppmega::mhc_projection", mutates_args=("parts",))
def projection(streams: Tensor, phi: Tensor, parts: Tensor) -> None:
    """The products with phi `[n * n + 2 * n, n * C]`, and the sums of squares.

    Args:
        streams: `[T, n, C]`, contiguous.
        phi: fp32, contiguous.
        parts: `[parts, T, padded(n)]` in fp32, parts as of `split`: the products of its columns,
            then the sum of squares.
    """
    tokens, n, c = streams.shape
    if tokens:
        _projection_kernel[(triton.cdiv(tokens, TOKENS), len(parts))](
            streams, phi, parts, tokens, split(tokens, n, c)[1], K=n * c, V=len(phi),
            PADDED=padded(n), TOKENS=TOKENS, COLUMNS=columns_of(n),
            EXACT="left" if streams.dtype == torch.bfloat16 else "",
            num_warps=WARPS, num_stages=3 if streams.dtype != torch.float32 else 2,
        )  # fmt: skip
