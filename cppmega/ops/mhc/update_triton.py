"""The streams after a sub-layer, mixed and with its output added, and all gradients of this.

The forward reads and writes each element once. The backward reads the streams, their gradient and
the output once, and writes the gradients of streams and output; a program processes an entire token
and keeps the n * n + n sums over its columns in registers, so that they are summed in a fixed
order. The gradient of a bias needs another pass over the streams' gradient, because its sum is over
tokens.

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
@triton.jit  # type: ignore[untyped-decorator]
def _update_kernel(  # type: ignore[no-untyped-def]
    streams, h_res, h_post, output, bias, out, C: tl.constexpr, N: tl.constexpr,
    BIAS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    PIECES: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    c = (tl.program_id(0) % PIECES) * COLUMNS + tl.arange(0, COLUMNS)
    here = c < C
    added = tl.load(output + token * C + c, mask=here, other=0.0).to(tl.float32)
    if BIAS:
        added += tl.load(bias + c, mask=here, other=0.0).to(tl.float32)
    x = empty()
    for i in tl.static_range(N):
        at = streams + (token * N + i) * C + c
        x = x + (tl.load(at, mask=here, other=0.0).to(tl.float32),)
    for j in tl.static_range(N):
        total = tl.load(h_post + token * N + j) * added
        for i in tl.static_range(N):
            total += tl.load(h_res + (token * N + i) * N + j) * x[i]
        tl.store(out + (token * N + j) * C + c, total.to(out.dtype.element_ty), mask=here)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _update_backward_kernel(  # type: ignore[no-untyped-def]
    streams, h_res, h_post, output, bias, gradient, d_streams, d_res, d_post, d_output,
    C: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    # Loaded before the loop: the compiler cannot exclude that its stores change them.
    mix, post, sums = empty(), empty(), empty()
    for e in tl.static_range(N * N):
        mix = mix + (tl.load(h_res + token * (N * N) + e),)
    for j in tl.static_range(N):
        post = post + (tl.load(h_post + token * N + j),)
    for _ in tl.static_range(N * N + N):
        sums = sums + (tl.zeros((COLUMNS,), tl.float32),)
    for first in tl.range(0, C, COLUMNS, num_stages=STAGES):
        c = first + tl.arange(0, COLUMNS)
        here = c < C
        added = tl.load(output + token * C + c, mask=here, other=0.0).to(tl.float32)
        if BIAS:
            added += tl.load(bias + c, mask=here, other=0.0).to(tl.float32)
        g = empty()
        total = tl.zeros((COLUMNS,), tl.float32)
        for j in tl.static_range(N):
            at = gradient + (token * N + j) * C + c
            g = g + (tl.load(at, mask=here, other=0.0).to(tl.float32),)
            total += post[j] * g[j]
        tl.store(d_output + token * C + c, total.to(d_output.dtype.element_ty), mask=here)
        more = empty()
        for i in tl.static_range(N):
            at = (token * N + i) * C + c
            x = tl.load(streams + at, mask=here, other=0.0).to(tl.float32)
            total = tl.zeros((COLUMNS,), tl.float32)
            for j in tl.static_range(N):
                total += mix[i * N + j] * g[j]
                more = more + (sums[i * N + j] + x * g[j],)
            tl.store(d_streams + at, total.to(d_streams.dtype.element_ty), mask=here)
        for j in tl.static_range(N):
            more = more + (sums[N * N + j] + added * g[j],)
        sums = more
    for e in tl.static_range(N * N):
        tl.store(d_res + token * (N * N) + e, tl.sum(sums[e], 0))
    for j in tl.static_range(N):
        tl.store(d_post + token * N + j, tl.sum(sums[N * N + j], 0))


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _bias_gradient_kernel(  # type: ignore[no-untyped-def]
    h_post, gradient, out, tokens, most, C: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The sum over `most` tokens of the output's gradient, before it is rounded."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = c < C
    first = tl.program_id(1) * most
    total = tl.zeros((COLUMNS,), tl.float32)
    for near in tl.range(first, tl.minimum(first + most, tokens), num_stages=STAGES):
        token = tl.cast(near, tl.int64)
        each = tl.zeros((COLUMNS,), tl.float32)
        for j in tl.static_range(N):
            g = tl.load(gradient + (token * N + j) * C + c, mask=here, other=0.0).to(tl.float32)
            each += tl.load(h_post + token * N + j) * g
        total += each
    tl.store(out + tl.program_id(1).to(tl.int64) * C + c, total, mask=here)


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
