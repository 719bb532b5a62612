"""The projection of all streams of a token to the n * n + 2 * n logits, and their sum of squares.

This is a skinny GEMM. Grid: blocks of 128 tokens x parts of the n * C columns. A program holds the
padded logits `[128, PADDED]` of its tokens, with the sum of squares in the first padding column,
and walks along its columns. The streams are read once; phi is read once per block of tokens; the
partial logits are written once, and `weights_triton` sums them in a fixed order. Errors are those
of fp32: bf16 streams are multiplied by phi in three bf16 parts (`parts_triton`), others by
three-term TF32.

With n = 4 it takes 1.2 times as long on an H200 as reading the streams, so memory bandwidth nearly
limits it; see `benchmarks/results/mhc_designs.md`.

`cppmega.ops.mhc.naive.logits` contains the reference implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mhc.parts_triton import product

PROGRAMS = 1024
"""With few tokens, columns are split until there are this many programs."""

WARPS = 8


def padded(n: int) -> int:
    """Columns of the padded logits, one of which is for the sum of squares."""
    return max(16, int(triton.next_power_of_2(n * n + 2 * n + 1)))


def tile(n: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Tokens per program, columns per step, and pipeline stages."""
    return 128, 64 if n < 8 else 32, 3 if dtype != torch.float32 else 2


@on_its_device
@triton.jit
def _projection_kernel(
    streams, phi, parts, tokens, each, K: tl.constexpr, V: tl.constexpr, PADDED: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, IN_PARTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask_t = token < tokens
    v = tl.arange(0, PADDED)
    first = tl.program_id(1) * each
    acc = tl.zeros((TOKENS, PADDED), tl.float32)
    # Sums of eight columns each, which one thread reads together.
    squares = tl.zeros((TOKENS, COLUMNS // 8), tl.float32)
    for begin in range(first, tl.minimum(first + each, K), COLUMNS):
        k = begin + tl.arange(0, COLUMNS)
        mask_k = k < K
        offs = token[:, None] * K + k[None, :]
        x = tl.load(streams + offs, mask=mask_t[:, None] & mask_k[None, :], other=0.0)
        mask_w = (v < V)[:, None] & mask_k[None, :]
        phi_ptrs = phi + v[:, None] * K + k[None, :]
        w = tl.load(phi_ptrs, mask=mask_w, other=0.0)
        wide = x.to(tl.float32)
        if IN_PARTS:
            middle = tl.load(phi_ptrs + V * K, mask=mask_w, other=0.0)
            low = tl.load(phi_ptrs + 2 * V * K, mask=mask_w, other=0.0)
            acc += product(x, tl.trans(w), tl.trans(middle), tl.trans(low))
        else:
            acc = tl.dot(wide, tl.trans(w), acc, input_precision="tf32x3")
        squares += tl.sum(tl.reshape(wide * wide, (TOKENS, COLUMNS // 8, 8)), 2)
    acc = tl.where((v == V)[None, :], tl.sum(squares, 1)[:, None], acc)
    row = tl.program_id(1).to(tl.int64) * tokens + token
    tl.store(parts + row[:, None] * PADDED + v[None, :], acc, mask=mask_t[:, None])


def split(tokens: int, n: int, c: int, dtype: torch.dtype) -> tuple[int, int]:
    """The number of parts into which the columns are split, and the columns of each part."""
    block_tokens, step, *_ = tile(n, dtype)
    wanted = triton.cdiv(PROGRAMS, max(1, triton.cdiv(tokens, block_tokens)))
    steps = triton.cdiv(n * c, step)
    each = max(4, triton.cdiv(steps, wanted)) * step
    return triton.cdiv(n * c, each), each


@torch.library.custom_op("cppmega::mhc_projection", mutates_args=("parts",))
def projection(streams: Tensor, phi: Tensor, parts: Tensor) -> None:
    """Compute the products with phi `[n * n + 2 * n, n * C]`, and the sums of squares.

    Args:
        streams: `[T, n, C]`, contiguous.
        phi: fp32, or its parts; see `parts_triton.factor`.
        parts: `[parts, T, padded(n)]` in fp32, with the number of parts of `split`: the products of
            a part's columns, then the sum of squares.
    """
    tokens, n, c = streams.shape
    if tokens:
        block_tokens, columns, stages = tile(n, streams.dtype)
        _projection_kernel[(triton.cdiv(tokens, block_tokens), len(parts))](
            streams, phi, parts, tokens, split(tokens, n, c, streams.dtype)[1], K=n * c,
            V=n * n + 2 * n, PADDED=padded(n), TOKENS=block_tokens, COLUMNS=columns,
            IN_PARTS=phi.ndim == 3, num_warps=WARPS, num_stages=stages,
        )  # fmt: skip
