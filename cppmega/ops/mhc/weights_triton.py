"""Norm, sigmoids and Sinkhorn after the projection, in one launch per direction.

Grid: blocks of tokens (`sinkhorn_triton.tile`); a program holds the n * n + 2 * n logits of its
tokens in registers, one token per lane or per few lanes. The forward reads the partial products of
the projection once and writes their sum, `[T, padded(n)]`, from which the backward recomputes
everything else, and the weights. The backward reads the sum and the gradients of the weights once
and writes the gradient of the products. The gradients of scales and bias are summed within each
program; then the single program of `_parameters_kernel` adds these sums in a fixed order.

Sinkhorn's chain of divisions, not memory, takes most of the backward's time
(`benchmarks/results/mhc_designs.md`).

`cppmega.ops.mhc.naive.weights` is the reference implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mhc.parts_triton import store_parts
from cppmega.ops.mhc.projection_triton import padded
from cppmega.ops.mhc.sinkhorn_triton import (
    SINKHORN_EPS,
    doubly_stochastic,
    gradient_of_logits,
    kept,
    places,
    tile,
)

ROWS = 64
"""Programs whose sums are added at a time."""

EPS = SINKHORN_EPS  # the same in the norm and in `h_pre`


@triton.jit
def _length(squares, ROOT: tl.constexpr):
    """The norm of the streams over the root of their number of elements, plus epsilon."""
    return tl.sqrt_rn(squares) * (1.0 / ROOT) + EPS


@triton.jit
def _row_of(offs, N: tl.constexpr):
    """The columns of `h_pre`, `[N, 1]`, and of `h_res`, `[N, N, 1]`, from their addresses."""
    return offs[None, :] + tl.arange(0, N)[:, None], offs[None, None, :] + 2 * N + places(N)


@triton.jit
def _logits(pre, post, res, r, alpha_pre, alpha_post, alpha_res, bias, N: tl.constexpr):
    """The scaled products plus bias: of `h_pre`, `h_post` `[N, T]` and `h_res` `[N, N, T]`."""
    i = tl.arange(0, N)[:, None]
    pre = r[None, :] * pre * tl.load(alpha_pre) + tl.load(bias + i)
    post = r[None, :] * post * tl.load(alpha_post) + tl.load(bias + N + i)
    res = r[None, None, :] * res * tl.load(alpha_res) + tl.load(bias + 2 * N + places(N))
    return pre, post, res


@on_its_device
@triton.jit
def _weights_kernel(
    parts, alpha_pre, alpha_post, alpha_res, bias, values, h_pre, h_post, h_res, tokens, count,
    iterations, ROOT: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = token < tokens
    vector, matrix = mask[None, :], mask[None, None, :]
    V: tl.constexpr = N * N + 2 * N
    pre = tl.zeros((N, LANES), tl.float32)
    post = tl.zeros((N, LANES), tl.float32)
    res = tl.zeros((N, N, LANES), tl.float32)
    squares = tl.zeros((LANES,), tl.float32)
    for part in range(count):
        offs = (tl.cast(part, tl.int64) * tokens + token) * PADDED
        offs_pre, offs_res = _row_of(offs, N)
        pre += tl.load(parts + offs_pre, mask=vector, other=0.0)
        post += tl.load(parts + offs_pre + N, mask=vector, other=0.0)
        res += tl.load(parts + offs_res, mask=matrix, other=0.0)
        squares += tl.load(parts + offs + V, mask=mask, other=0.0)
    offs_pre, offs_res = _row_of(token * PADDED, N)
    tl.store(values + offs_pre, pre, mask=vector)
    tl.store(values + offs_pre + N, post, mask=vector)
    tl.store(values + offs_res, res, mask=matrix)
    tl.store(values + token * PADDED + V, squares, mask=mask)
    r = 1.0 / _length(squares, ROOT)
    pre, post, res = _logits(pre, post, res, r, alpha_pre, alpha_post, alpha_res, bias, N)
    offs = token[None, :] * N + tl.arange(0, N)[:, None]
    tl.store(h_pre + offs, tl.sigmoid(pre) + EPS, mask=vector)
    tl.store(h_post + offs, tl.sigmoid(post) * 2, mask=vector)
    offs = token[None, None, :] * (N * N) + places(N)
    tl.store(h_res + offs, doubly_stochastic(res, iterations), mask=matrix)


@on_its_device
@triton.jit
def _weights_backward_kernel(
    values, alpha_pre, alpha_post, alpha_res, bias, d_pre, d_post, d_res, d_values, d_parts, sums,
    tokens, iterations, ROOT: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr,
    IN_PARTS: tl.constexpr, STEPS: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = token < tokens
    vector, matrix = mask[None, :], mask[None, None, :]
    V: tl.constexpr = N * N + 2 * N
    offs_pre, offs_res = _row_of(token * PADDED, N)
    p_pre = tl.load(values + offs_pre, mask=vector, other=0.0)
    p_post = tl.load(values + offs_pre + N, mask=vector, other=0.0)
    p_res = tl.load(values + offs_res, mask=matrix, other=0.0)
    squares = tl.load(values + token * PADDED + V, mask=mask, other=0.0)
    r = 1.0 / _length(squares, ROOT)
    pre, post, res = _logits(p_pre, p_post, p_res, r, alpha_pre, alpha_post, alpha_res, bias, N)
    offs = token[None, :] * N + tl.arange(0, N)[:, None]
    h = tl.sigmoid(pre)
    pre = tl.load(d_pre + offs, mask=vector, other=0.0) * h * (1 - h)
    h = tl.sigmoid(post)
    post = tl.load(d_post + offs, mask=vector, other=0.0) * 2 * h * (1 - h)
    offs = token[None, None, :] * (N * N) + places(N)
    b_do = tl.load(d_res + offs, mask=matrix, other=0.0)
    res = gradient_of_logits(res, b_do, iterations, STEPS, WHOLE)
    # Sums over the tokens: those of the bias, then those of the scales by column.
    p_sums = sums + tl.program_id(0).to(tl.int64) * (2 * V)
    column, square = tl.arange(0, N), tl.reshape(places(N), (N, N))
    tl.store(p_sums + column, tl.sum(pre, 1))
    tl.store(p_sums + N + column, tl.sum(post, 1))
    tl.store(p_sums + 2 * N + square, tl.sum(res, 2))
    p_pre *= pre
    p_post *= post
    p_res *= res
    tl.store(p_sums + V + column, tl.sum(p_pre * r[None, :], 1))
    tl.store(p_sums + V + N + column, tl.sum(p_post * r[None, :], 1))
    tl.store(p_sums + V + 2 * N + square, tl.sum(p_res * r[None, None, :], 2))
    a_pre, a_post, a_res = tl.load(alpha_pre), tl.load(alpha_post), tl.load(alpha_res)
    pre *= r[None, :] * a_pre
    post *= r[None, :] * a_post
    res *= r[None, None, :] * a_res
    if IN_PARTS:
        size = tl.cast(tokens, tl.int64) * PADDED
        store_parts(d_parts, offs_pre, pre, vector, size)
        store_parts(d_parts, offs_pre + N, post, vector, size)
        store_parts(d_parts, offs_res, res, matrix, size)
    else:
        tl.store(d_values + offs_pre, pre, mask=vector)
        tl.store(d_values + offs_pre + N, post, mask=vector)
        tl.store(d_values + offs_res, res, mask=matrix)
    # The factor of x itself: the norm's gradient is x over the norm, and zero where the norm is 0.
    dr = tl.sum(p_pre, 0) * a_pre + tl.sum(p_post, 0) * a_post
    dr += tl.sum(tl.sum(p_res, 0), 0) * a_res
    norm = tl.sqrt_rn(squares)
    scale = -r * r * (1.0 / ROOT) / tl.where(norm > 0, norm, 1.0)
    x_factor = tl.where(norm > 0, dr * scale, 0.0)
    tl.store(d_values + token * PADDED + V, x_factor, mask=mask)


@on_its_device
@triton.jit
def _parameters_kernel(
    sums, d_pre, d_post, d_res, d_bias, programs, N: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of bias and scales from the sums of the programs."""
    V: tl.constexpr = N * N + 2 * N
    v = tl.arange(0, PADDED)
    bias = tl.zeros((PADDED,), tl.float32)
    scale = tl.zeros((PADDED,), tl.float32)
    for first in range(0, programs, ROWS):
        program = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        ptrs = sums + program[:, None] * (2 * V) + v[None, :]
        mask = (program < programs)[:, None] & (v < V)[None, :]
        bias += tl.sum(tl.load(ptrs, mask=mask, other=0.0), 0)
        scale += tl.sum(tl.load(ptrs + V, mask=mask, other=0.0), 0)
    tl.store(d_bias + v, bias, mask=v < V)
    tl.store(d_pre, tl.sum(tl.where(v < N, scale, 0.0), 0))
    tl.store(d_post, tl.sum(tl.where((v >= N) & (v < 2 * N), scale, 0.0), 0))
    tl.store(d_res, tl.sum(tl.where(v >= 2 * N, scale, 0.0), 0))


def programs(tokens: int, n: int) -> int:
    """The number of programs, each of which has its own sums."""
    return -(-tokens // tile(n).tokens)


@torch.library.custom_op(
    "cppmega::mhc_weights", mutates_args=("values", "h_pre", "h_post", "h_res")
)
def weights(
    parts: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    values: Tensor,
    h_pre: Tensor,
    h_post: Tensor,
    h_res: Tensor,
    width: int,
    iterations: int,
) -> None:
    """Compute the weights of a site; all tensors are fp32 and contiguous.

    Args:
        parts: `[parts, T, padded(n)]`, of `projection_triton.projection`.
        alpha_pre, alpha_post, alpha_res, bias: as in `naive.Parameters`.
        values: `[T, padded(n)]`, receives the sum of the parts.
        h_pre, h_post, h_res: `[T, n]`, `[T, n]`, `[T, n, n]`, receive the weights.
        width: columns of all streams, n * C.
        iterations: Sinkhorn iterations.
    """
    tokens, n = h_pre.shape
    if tokens:
        lanes, warps, _ = tile(n)
        _weights_kernel[(programs(tokens, n),)](
            parts, alpha_pre, alpha_post, alpha_res, bias, values, h_pre, h_post, h_res, tokens,
            len(parts), iterations, ROOT=width**0.5, N=n, PADDED=padded(n), LANES=lanes,
            num_warps=warps,
        )  # fmt: skip


@torch.library.custom_op(
    "cppmega::mhc_weights_backward", mutates_args=("d_values", "d_parts", "sums")
)
def weights_backward(
    values: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    d_pre: Tensor,
    d_post: Tensor,
    d_res: Tensor,
    d_values: Tensor,
    d_parts: Tensor,
    sums: Tensor,
    width: int,
    iterations: int,
) -> None:
    """Compute the gradient of the products, and each program's sums for bias and scales.

    Args:
        values: those of `weights`.
        alpha_pre, alpha_post, alpha_res, bias, width, iterations: as for `weights`.
        d_pre, d_post, d_res: gradients of the weights.
        d_values: `[T, padded(n)]`, receives the gradient of the products and, in the next column,
            the factor of the streams in their own gradient.
        d_parts: `[3, T, padded(n)]`, bf16, receives the former instead, in parts; or without
            elements.
        sums: `[programs(T, n), 2, n * n + 2 * n]`, for `parameters`.
    """
    tokens, n = d_pre.shape
    if tokens:
        lanes, warps, _ = tile(n)
        _weights_backward_kernel[(programs(tokens, n),)](
            values, alpha_pre, alpha_post, alpha_res, bias, d_pre, d_post, d_res, d_values,
            d_parts, sums, tokens, iterations, ROOT=width**0.5, N=n, PADDED=padded(n),
            IN_PARTS=d_parts.numel() > 0, **kept(n, iterations), LANES=lanes, num_warps=warps,
        )  # fmt: skip


@torch.library.custom_op(
    "cppmega::mhc_parameters", mutates_args=("d_pre", "d_post", "d_res", "d_bias")
)
def parameters(
    sums: Tensor, d_pre: Tensor, d_post: Tensor, d_res: Tensor, d_bias: Tensor, n: int
) -> None:
    """Compute the gradients of the scales, `[1]`, and the bias from the programs' sums."""
    _parameters_kernel[(1,)](
        sums, d_pre, d_post, d_res, d_bias, len(sums), N=n, PADDED=padded(n), ROWS=ROWS, num_warps=4
    )
