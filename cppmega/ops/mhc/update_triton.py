"""The streams after a sub-layer, mixed and with its output added, and all gradients of this.

- `_update_kernel`: grid tokens x blocks of COLUMNS. A program holds the same columns of all n
  streams of a token; streams and output are read once, the new streams are written once.
- `_update_backward_kernel`: grid tokens. A program walks along the columns and keeps the n * n + n
  gradients of `h_res` and `h_post` in registers, so that they are summed in a fixed order. It reads
  streams, dO and output once, and writes the gradients of streams and output once.
- `_bias_gradient_kernel`: grid blocks of columns x parts of the tokens. It reads dO once more,
  because a bias's gradient is a sum over tokens.

Memory bandwidth limits all three: with n = 4 on an H200 they run at the rate of a copy
(`benchmarks/results/mhc_designs.md`). With n = 8 registers limit the backward, too: its 72 sums
leave room for 64 columns per step and one warp.

`cppmega.ops.mhc.naive.update` is the reference implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mhc.sinkhorn_triton import empty

COLUMNS = 1024
"""Columns per program of the forward."""

TOKENS = 4096
"""Maximum number of tokens that a program of the bias's gradient sums."""

WARPS = 4

STAGES = 3
"""Pipeline stages of the backward and of the bias's gradient."""


def _tile_backward(n: int) -> tuple[int, int]:
    """Columns per step of the backward, whose n * n + n sums stay in registers, and its warps."""
    return (512, 2) if n < 8 else (64, 1)


@on_its_device
@triton.jit
def _update_kernel(
    streams, h_res, h_post, output, bias, out, C: tl.constexpr, N: tl.constexpr,
    BIAS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    PIECES: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    c = (tl.program_id(0) % PIECES) * COLUMNS + tl.arange(0, COLUMNS)
    mask = c < C
    y = tl.load(output + token * C + c, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + c, mask=mask, other=0.0).to(tl.float32)
    x = empty()
    for i in tl.static_range(N):
        ptrs = streams + (token * N + i) * C + c
        x = x + (tl.load(ptrs, mask=mask, other=0.0).to(tl.float32),)
    for j in tl.static_range(N):
        acc = tl.load(h_post + token * N + j) * y
        for i in tl.static_range(N):
            acc += tl.load(h_res + (token * N + i) * N + j) * x[i]
        tl.store(out + (token * N + j) * C + c, acc.to(out.dtype.element_ty), mask=mask)


@on_its_device
@triton.jit
def _update_backward_kernel(
    streams, h_res, h_post, output, bias, do, d_streams, d_res, d_post, d_output,
    C: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    # Loaded before the loop: the compiler cannot exclude that its stores change them.
    mix, post, acc = empty(), empty(), empty()
    for e in tl.static_range(N * N):
        mix = mix + (tl.load(h_res + token * (N * N) + e),)
    for j in tl.static_range(N):
        post = post + (tl.load(h_post + token * N + j),)
    for _ in tl.static_range(N * N + N):
        acc = acc + (tl.zeros((COLUMNS,), tl.float32),)
    for first in tl.range(0, C, COLUMNS, num_stages=STAGES):
        c = first + tl.arange(0, COLUMNS)
        mask = c < C
        y = tl.load(output + token * C + c, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(bias + c, mask=mask, other=0.0).to(tl.float32)
        g = empty()
        dy = tl.zeros((COLUMNS,), tl.float32)
        for j in tl.static_range(N):
            ptrs = do + (token * N + j) * C + c
            g = g + (tl.load(ptrs, mask=mask, other=0.0).to(tl.float32),)
            dy += post[j] * g[j]
        tl.store(d_output + token * C + c, dy.to(d_output.dtype.element_ty), mask=mask)
        next_acc = empty()
        for i in tl.static_range(N):
            ptrs = (token * N + i) * C + c
            x = tl.load(streams + ptrs, mask=mask, other=0.0).to(tl.float32)
            dx = tl.zeros((COLUMNS,), tl.float32)
            for j in tl.static_range(N):
                dx += mix[i * N + j] * g[j]
                next_acc = next_acc + (acc[i * N + j] + x * g[j],)
            tl.store(d_streams + ptrs, dx.to(d_streams.dtype.element_ty), mask=mask)
        for j in tl.static_range(N):
            next_acc = next_acc + (acc[N * N + j] + y * g[j],)
        acc = next_acc
    for e in tl.static_range(N * N):
        tl.store(d_res + token * (N * N) + e, tl.sum(acc[e], 0))
    for j in tl.static_range(N):
        tl.store(d_post + token * N + j, tl.sum(acc[N * N + j], 0))


@on_its_device
@triton.jit
def _bias_gradient_kernel(
    h_post, do, out, tokens, most, C: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of the output over `most` tokens, before it is rounded."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = c < C
    first = tl.program_id(1) * most
    acc = tl.zeros((COLUMNS,), tl.float32)
    for row in tl.range(first, tl.minimum(first + most, tokens), num_stages=STAGES):
        token = tl.cast(row, tl.int64)
        dy = tl.zeros((COLUMNS,), tl.float32)
        for j in tl.static_range(N):
            g = tl.load(do + (token * N + j) * C + c, mask=mask, other=0.0).to(tl.float32)
            dy += tl.load(h_post + token * N + j) * g
        acc += dy
    tl.store(out + tl.program_id(1).to(tl.int64) * C + c, acc, mask=mask)


@torch.library.custom_op("cppmega::mhc_update", mutates_args=("out",))
def update(
    streams: Tensor, h_res: Tensor, h_post: Tensor, output: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Write `h_res` transposed times streams `[T, n, C]`, plus `h_post` times output, to `out`."""
    tokens, n, c = streams.shape
    if tokens:
        _update_kernel[(tokens * triton.cdiv(c, COLUMNS),)](
            streams, h_res, h_post, output, output if bias is None else bias, out,
            C=c, N=n, BIAS=bias is not None, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip


@torch.library.custom_op(
    "cppmega::mhc_update_backward", mutates_args=("d_streams", "d_res", "d_post", "d_output")
)
def update_backward(
    streams: Tensor,
    h_res: Tensor,
    h_post: Tensor,
    output: Tensor,
    bias: Tensor | None,
    gradient: Tensor,
    d_streams: Tensor,
    d_res: Tensor,
    d_post: Tensor,
    d_output: Tensor,
) -> None:
    """Write the gradients of `update`, except the bias's, to tensors of their shapes."""
    tokens, n, c = streams.shape
    if tokens:
        columns, warps = _tile_backward(n)
        _update_backward_kernel[(tokens,)](
            streams, h_res, h_post, output, output if bias is None else bias, gradient,
            d_streams, d_res, d_post, d_output,
            C=c, N=n, BIAS=bias is not None, COLUMNS=columns, STAGES=STAGES, num_warps=warps,
        )  # fmt: skip


def bias_parts(tokens: int) -> tuple[int, int]:
    """The number of parts into which the bias's gradient is split, and the tokens of each."""
    most = min(TOKENS, max(1, triton.cdiv(tokens, 64)))
    return triton.cdiv(tokens, most), most


@torch.library.custom_op("cppmega::mhc_bias_gradient", mutates_args=("parts",))
def bias_gradient(h_post: Tensor, gradient: Tensor, parts: Tensor) -> None:
    """Write the sums of the bias's gradient over each part's tokens to `parts` `[parts, C]`."""
    tokens, n, c = gradient.shape
    if tokens:
        _bias_gradient_kernel[(triton.cdiv(c, COLUMNS), len(parts))](
            h_post, gradient, parts, tokens, bias_parts(tokens)[1],
            C=c, N=n, COLUMNS=COLUMNS, STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
