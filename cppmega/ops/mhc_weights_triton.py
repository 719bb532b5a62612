"""Norm, sigmoids and Sinkhorn after the projection, in one launch each way: one token per lane.

The forward adds up the parts of the projection and keeps their sum, `[T, padded(n)]`, from which
the backward computes everything else anew. The gradients of the scales and of the bias are sums
over tokens: first of each program's, then of all programs in one order.

`cppmega.ops.mhc_reference.weights` is the plain form.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.mhc_projection_triton import padded
from cppmega.ops.mhc_sinkhorn_triton import (
    LANES,
    SINKHORN_EPS,
    WARPS,
    doubly_stochastic,
    empty,
    gradient_of_logits,
    row,
    steps_kept,
    stored,
)

EPS = SINKHORN_EPS  # the same in the norm and in `h_pre`


@triton.jit  # type: ignore[untyped-decorator]
def _length(squares, ROOT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The norm of the streams over the root of their number, plus epsilon."""
    return tl.sqrt_rn(squares) * (1.0 / ROOT) + EPS


@triton.jit  # type: ignore[untyped-decorator]
def _logits(found, r, pre, post, res, bias, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scaled products plus bias."""
    out = empty()
    for v in tl.static_range(N * N + 2 * N):
        alpha = pre if v < N else (post if v < 2 * N else res)
        out = out + (r * found[v] * alpha + tl.load(bias + v),)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _last(values, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values of `h_res`."""
    out = empty()
    for e in tl.static_range(N * N):
        out = out + (values[2 * N + e],)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _weights_kernel(  # type: ignore[no-untyped-def]
    parts, alpha_pre, alpha_post, alpha_res, bias, values, h_pre, h_post, h_res, tokens, count,
    iterations, ROOT: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    here = token < tokens
    V: tl.constexpr = N * N + 2 * N
    found = row(parts + token * PADDED, here, V + 1)
    for part in range(1, count):
        more = row(parts + (tl.cast(part, tl.int64) * tokens + token) * PADDED, here, V + 1)
        both = empty()
        for v in tl.static_range(V + 1):
            both = both + (found[v] + more[v],)
        found = both
    stored(values + token * PADDED, here, found, V + 1)
    r = 1.0 / _length(found[V], ROOT)
    pre, post, res = tl.load(alpha_pre), tl.load(alpha_post), tl.load(alpha_res)
    z = _logits(found, r, pre, post, res, bias, N)
    for i in tl.static_range(N):
        tl.store(h_pre + token * N + i, tl.sigmoid(z[i]) + EPS, mask=here)
        tl.store(h_post + token * N + i, tl.sigmoid(z[N + i]) * 2, mask=here)
    mixing = doubly_stochastic(_last(z, N), iterations, N)
    stored(h_res + token * (N * N), here, mixing, N * N)


@triton.jit  # type: ignore[untyped-decorator]
def _weights_backward_kernel(  # type: ignore[no-untyped-def]
    values, alpha_pre, alpha_post, alpha_res, bias, d_pre, d_post, d_res, d_values, sums, tokens,
    iterations, ROOT: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    here = token < tokens
    V: tl.constexpr = N * N + 2 * N
    found = row(values + token * PADDED, here, V + 1)
    length = _length(found[V], ROOT)
    r = 1.0 / length
    pre, post, res = tl.load(alpha_pre), tl.load(alpha_post), tl.load(alpha_res)
    z = _logits(found, r, pre, post, res, bias, N)
    dz = empty()
    for i in tl.static_range(N):
        h = tl.sigmoid(z[i])
        dz = dz + (tl.load(d_pre + token * N + i, mask=here, other=0.0) * h * (1 - h),)
    for i in tl.static_range(N):
        h = tl.sigmoid(z[N + i])
        dz = dz + (tl.load(d_post + token * N + i, mask=here, other=0.0) * 2 * h * (1 - h),)
    given = row(d_res + token * (N * N), here, N * N)
    dz = dz + gradient_of_logits(_last(z, N), given, iterations, N, STEPS)
    of_program = sums + tl.program_id(0).to(tl.int64) * (2 * V)
    dr = tl.zeros((LANES,), tl.float32)
    for v in tl.static_range(V):
        alpha = pre if v < N else (post if v < 2 * N else res)
        dr += dz[v] * found[v] * alpha
        tl.store(d_values + token * PADDED + v, dz[v] * r * alpha, mask=here)
        tl.store(of_program + v, tl.sum(dz[v], 0))
        tl.store(of_program + V + v, tl.sum(dz[v] * r * found[v], 0))
    # Of x itself: the norm's gradient is x over the norm, and nothing where there is no norm.
    norm = tl.sqrt_rn(found[V])
    scale = -r * r * (1.0 / ROOT) / tl.where(norm > 0, norm, 1.0)
    of_streams = tl.where(norm > 0, dr * scale, 0.0)
    tl.store(d_values + token * PADDED + V, of_streams, mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _parameters_kernel(  # type: ignore[no-untyped-def]
    sums, d_pre, d_post, d_res, d_bias, programs, N: tl.constexpr, PADDED: tl.constexpr
):
    """The gradients of bias and scales from the sums of the programs."""
    V: tl.constexpr = N * N + 2 * N
    v = tl.arange(0, PADDED)
    bias = tl.zeros((PADDED,), tl.float32)
    scale = tl.zeros((PADDED,), tl.float32)
    for program in range(programs):
        at = sums + tl.cast(program, tl.int64) * (2 * V) + v
        bias += tl.load(at, mask=v < V, other=0.0)
        scale += tl.load(at + V, mask=v < V, other=0.0)
    tl.store(d_bias + v, bias, mask=v < V)
    tl.store(d_pre, tl.sum(tl.where(v < N, scale, 0.0), 0))
    tl.store(d_post, tl.sum(tl.where((v >= N) & (v < 2 * N), scale, 0.0), 0))
    tl.store(d_res, tl.sum(tl.where(v >= 2 * N, scale, 0.0), 0))


def programs(tokens: int) -> int:
    """How many programs have a sum of their own."""
    return -(-tokens // LANES)


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
    """The weights of a site; all fp32 and contiguous.

    Args:
        parts: `[parts, T, padded(n)]`, of `mhc_projection_triton.projection`.
        alpha_pre, alpha_post, alpha_res, bias: as in `mhc_reference.Parameters`.
        values: `[T, padded(n)]`, becomes the sum of the parts.
        h_pre, h_post, h_res: `[T, n]`, `[T, n]`, `[T, n, n]`, become the weights.
        width: columns of all streams, n * C.
        iterations: of Sinkhorn.
    """
    tokens, n = h_pre.shape
    if tokens:
        _weights_kernel[(programs(tokens),)](
            parts, alpha_pre, alpha_post, alpha_res, bias, values, h_pre, h_post, h_res, tokens,
            len(parts), iterations, ROOT=width**0.5, N=n, PADDED=padded(n), LANES=LANES,
            num_warps=WARPS,
        )  # fmt: skip


@torch.library.custom_op("cppmega::mhc_weights_backward", mutates_args=("d_values", "sums"))
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
    sums: Tensor,
    width: int,
    iterations: int,
) -> None:
    """The gradient of the products, and each program's sums for bias and scales.

    Args:
        values: of `weights`.
        alpha_pre, alpha_post, alpha_res, bias, width, iterations: as of `weights`.
        d_pre, d_post, d_res: gradients of the weights.
        d_values: `[T, padded(n)]`, becomes the gradient of the products, and beside it the factor
            of the streams in their own gradient.
        sums: `[programs(T), 2, n * n + 2 * n]`, for `parameters`.
    """
    tokens, n = d_pre.shape
    if tokens:
        _weights_backward_kernel[(programs(tokens),)](
            values, alpha_pre, alpha_post, alpha_res, bias, d_pre, d_post, d_res, d_values, sums,
            tokens, iterations, ROOT=width**0.5, N=n, PADDED=padded(n), STEPS=steps_kept(n),
            LANES=LANES, num_warps=WARPS,
        )  # fmt: skip


@torch.library.custom_op(
    "cppmega::mhc_parameters", mutates_args=("d_pre", "d_post", "d_res", "d_bias")
)
def parameters(
    sums: Tensor, d_pre: Tensor, d_post: Tensor, d_res: Tensor, d_bias: Tensor, n: int
) -> None:
    """The gradients of the scales, `[1]`, and the bias, from the programs' sums."""
    _parameters_kernel[(1,)](
        sums, d_pre, d_post, d_res, d_bias, len(sums), N=n, PADDED=padded(n), num_warps=4
    )
