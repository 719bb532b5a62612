"""The operands of Mamba-3's scan from the projection, and their gradients; all memory-bound.

Two launches per direction read the projection in place, once, and write each result once:

- `_states_*`: RMSNorm of the rows of keys and queries, and their transposition from groups x ranks
  to ranks x groups. Grid: tokens (backward: blocks of TOKENS) x {keys, queries}; a program holds
  all rows `[g * R, n]` of one token.
- `_heads_*`: dt, log a and the trapezoid's share per head, transposed so that time is the last
  axis, and optionally a copy of the angles per head. Grid: blocks of tokens x blocks of heads x
  sequences; the backward loops over the heads instead, since they share the angles.

Backward programs sum the gradients of parameters over their own tokens; the partial sums are added
in a fixed order. `mamba3.operands.plain` is the reference implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mamba3.naive import A_FLOOR, EPSILON, Definition

TOKENS = 16
"""Tokens per program; in the forward of keys and queries a program has one."""

HEADS = 16
"""Heads that a program handles at a time."""

NORM_EPS = tl.constexpr(EPSILON)
LEAST_RATE = tl.constexpr(A_FLOOR)

Pair = tuple[Tensor, Tensor]


@triton.jit  # type: ignore[untyped-decorator]
def _columns(N: tl.constexpr, HALVE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the projection has the scan's columns: elsewhere if `naive.halved` reorders them."""
    n = tl.arange(0, N)
    if HALVE:
        K: tl.constexpr = N // 4
        first = tl.where(n < K, 2 * n, n + K)
        second = tl.where(n < 3 * K, 2 * (n - 2 * K) + 1, n)
        n = tl.where(n < 2 * K, first, second)
    return n


@triton.jit  # type: ignore[untyped-decorator]
def _rows_of(  # type: ignore[no-untyped-def]
    x, start, weight, n, here, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Load all rows of a token in fp32, their reciprocal RMS, the norm's weight, and the mask."""
    row = tl.arange(0, ROWS)
    mask = (row < G * R)[:, None] & here
    v = tl.load(x + start + row[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(v * v, 1) / N + NORM_EPS)
    return v, rstd, tl.load(weight + n).to(tl.float32), mask


@triton.jit  # type: ignore[untyped-decorator]
def _places(token, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets in `[R, g, n]` of the rows of `[g, R, n]`."""
    row = tl.arange(0, ROWS)
    to = (row % R) * G + row // R
    return token * (G * R * N) + to[:, None] * N + tl.arange(0, N)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _exchanged(  # type: ignore[no-untyped-def]
    x, start, weight, out, token, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, HALVE: tl.constexpr,
):  # fmt: skip
    v, rstd, w, mask = _rows_of(x, start, weight, _columns(N, HALVE), True, G, R, N, ROWS)
    v *= rstd[:, None] * w[None, :]
    tl.store(out + _places(token, G, R, N, ROWS), v.to(out.dtype.element_ty), mask=mask)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _states_kernel(  # type: ignore[no-untyped-def]
    keys, queries, key_norm, query_norm, to_keys, to_queries, length, keys_b, keys_l, queries_b,
    queries_l, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
    HALVE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    b, at = token // length, token % length
    if tl.program_id(1) == 0:
        start = b * keys_b + at * keys_l
        _exchanged(keys, start, key_norm, to_keys, token, G, R, N, ROWS, HALVE)
    else:
        start = b * queries_b + at * queries_l
        _exchanged(queries, start, query_norm, to_queries, token, G, R, N, ROWS, HALVE)


@triton.jit  # type: ignore[untyped-decorator]
def _states_gradient(  # type: ignore[no-untyped-def]
    x, weight, dy_ptr, out, sums, tokens, length, stride_b, stride_l, G: tl.constexpr,
    R: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    HALVE: tl.constexpr,
):  # fmt: skip
    dw = tl.zeros((N,), tl.float32)
    row, n = tl.arange(0, ROWS), _columns(N, HALVE)
    for each in range(TOKENS):
        token = tl.program_id(0).to(tl.int64) * TOKENS + each
        start = (token // length) * stride_b + (token % length) * stride_l
        v, rstd, w, mask = _rows_of(x, start, weight, n, token < tokens, G, R, N, ROWS)
        v *= rstd[:, None]
        dy = tl.load(dy_ptr + _places(token, G, R, N, ROWS), mask=mask, other=0.0).to(tl.float32)
        dw += tl.sum(dy * v, 0)
        dy *= w[None, :]
        dx = (dy - v * (tl.sum(dy * v, 1) / N)[:, None]) * rstd[:, None]
        offs = token * (G * R * N) + row[:, None] * N + n[None, :]
        tl.store(out + offs, dx.to(out.dtype.element_ty), mask=mask)
    tl.store(sums + tl.program_id(0).to(tl.int64) * N + n, dw)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _states_backward_kernel(  # type: ignore[no-untyped-def]
    keys, queries, key_norm, query_norm, dy_keys, dy_queries, d_keys, d_queries, sums, tokens,
    length, keys_b, keys_l, queries_b, queries_l, G: tl.constexpr, R: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, HALVE: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _states_gradient(
            keys, key_norm, dy_keys, d_keys, sums, tokens, length, keys_b, keys_l, G, R, N, ROWS,
            TOKENS, HALVE,
        )  # fmt: skip
    else:
        sums += tl.num_programs(0).to(tl.int64) * N
        _states_gradient(
            queries, query_norm, dy_queries, d_queries, sums, tokens, length, queries_b, queries_l,
            G, R, N, ROWS, TOKENS, HALVE,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _log1p(u):  # type: ignore[no-untyped-def]
    """log(1 + u) for u >= 0, accurate even where 1 + u rounds to 1."""
    w = 1.0 + u
    return tl.where(w == 1.0, u, u * tl.log(w) / tl.where(w == 1.0, 1.0, w - 1.0))


@triton.jit  # type: ignore[untyped-decorator]
def _softplus(x):  # type: ignore[no-untyped-def]
    return tl.maximum(x, 0.0) + _log1p(tl.exp(-tl.abs(x)))


@triton.jit  # type: ignore[untyped-decorator]
def _rate(x, HEAVY_TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """-A, clamped from below, and its derivative."""
    if HEAVY_TAIL:
        below = 1.0 / (1.0 - tl.minimum(x, 0.0))
        rate = tl.maximum(x, 0.0) + below
        slope = below * below
    else:
        rate = _softplus(x)
        slope = tl.sigmoid(x)
    return tl.maximum(rate, LEAST_RATE), tl.where(rate >= LEAST_RATE, slope, 0.0)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _heads_kernel(  # type: ignore[no-untyped-def]
    dt, decay, trap, dt_bias, angles, to_log_a, to_dt, to_trap, to_angles, length, dt_b, dt_l,
    decay_b, decay_l, trap_b, trap_l, angles_b, angles_l, H: tl.constexpr, K: tl.constexpr,
    ANGLES: tl.constexpr, HEAVY_TAIL: tl.constexpr, SPREAD: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    tok = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = (tok < length)[:, None] & (h < H)[None, :]
    t, head = tok[:, None], h[None, :]
    raw = tl.load(dt + b * dt_b + t * dt_l + head, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + h, mask=h < H, other=0.0).to(tl.float32)
    step = _softplus(raw + bias[None, :])
    x = tl.load(decay + b * decay_b + t * decay_l + head, mask=mask, other=0.0).to(tl.float32)
    rate, _ = _rate(x, HEAVY_TAIL)
    share = tl.load(trap + b * trap_b + t * trap_l + head, mask=mask, other=0.0)
    offs_t = tl.trans((b * H + head) * length + t)
    mask_t = tl.trans(mask)
    tl.store(to_dt + offs_t, tl.trans(step), mask=mask_t)
    tl.store(to_log_a + offs_t, tl.trans(-rate * step), mask=mask_t)
    tl.store(to_trap + offs_t, tl.trans(share), mask=mask_t)
    if SPREAD:
        k = tl.arange(0, ANGLES)
        mask_k = (tok < length)[:, None] & (k < K)[None, :]
        turn = tl.load(angles + b * angles_b + t * angles_l + k[None, :], mask=mask_k, other=0.0)
        offs_all = ((b * length + t) * H + head)[:, :, None] * K + k[None, None, :]
        spread = tl.broadcast_to(turn.to(tl.float32)[:, None, :], (TOKENS, HEADS, ANGLES))
        tl.store(to_angles + offs_all, spread, mask=mask[:, :, None] & (k < K)[None, None, :])


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _heads_backward_kernel(  # type: ignore[no-untyped-def]
    dt, decay, dt_bias, dy_log_a, dy_dt, dy_trap, dy_angles, d_dt, d_decay, d_trap, d_angles, sums,
    length, dt_b, dt_l, decay_b, decay_l, H: tl.constexpr, K: tl.constexpr, ANGLES: tl.constexpr,
    HEAVY_TAIL: tl.constexpr, SPREAD: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    tok = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    t, k = tok[:, None], tl.arange(0, ANGLES)
    p_sums = sums + (b * tl.num_programs(0) + tl.program_id(0)) * H
    acc = tl.zeros((TOKENS, ANGLES), tl.float32)
    for first in range(0, H, HEADS):
        h = first + tl.arange(0, HEADS)
        mask = (tok < length)[:, None] & (h < H)[None, :]
        head = h[None, :]
        raw = tl.load(dt + b * dt_b + t * dt_l + head, mask=mask, other=0.0).to(tl.float32)
        raw += tl.load(dt_bias + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
        x = tl.load(decay + b * decay_b + t * decay_l + head, mask=mask, other=0.0).to(tl.float32)
        rate, slope = _rate(x, HEAVY_TAIL)
        offs_t = tl.trans((b * H + head) * length + t)
        mask_t = tl.trans(mask)
        d_log_a = tl.trans(tl.load(dy_log_a + offs_t, mask=mask_t, other=0.0)).to(tl.float32)
        d_step = tl.trans(tl.load(dy_dt + offs_t, mask=mask_t, other=0.0)).to(tl.float32)
        d_share = tl.trans(tl.load(dy_trap + offs_t, mask=mask_t, other=0.0))
        offs = (b * length + t) * H + head
        d_raw = (d_step - d_log_a * rate) * tl.sigmoid(raw)
        d_x = -d_log_a * _softplus(raw) * slope
        tl.store(d_dt + offs, d_raw.to(d_dt.dtype.element_ty), mask=mask)
        tl.store(d_decay + offs, d_x.to(d_decay.dtype.element_ty), mask=mask)
        tl.store(d_trap + offs, d_share.to(d_trap.dtype.element_ty), mask=mask)
        tl.store(p_sums + h, tl.sum(d_raw, 0), mask=h < H)
        if SPREAD:
            offs_all = offs[:, :, None] * K + k[None, None, :]
            mask_k = mask[:, :, None] & (k < K)[None, None, :]
            acc += tl.sum(tl.load(dy_angles + offs_all, mask=mask_k, other=0.0).to(tl.float32), 1)
    if SPREAD:
        offs = (b * length + t) * K + k[None, :]
        mask_k = (tok < length)[:, None] & (k < K)[None, :]
        tl.store(d_angles + offs, acc.to(d_angles.dtype.element_ty), mask=mask_k)


def states(x: Pair, weights: Pair, out: Pair, halve: bool) -> None:
    """Normalise keys and queries `[b, l, g, R, n]` and write them as `[b, l, R, g, n]`.

    Args:
        x: keys and queries; the last three axes are contiguous, and n is a power of two.
        weights: of the norms, `[n]`.
        out: contiguous.
        halve: reorder the columns n as `naive.halved`.
    """
    b, length, groups, rank, n = x[0].shape
    if b * length:
        _states_kernel[(b * length, 2)](
            *x, *(each.contiguous() for each in weights), *out, length,
            *x[0].stride()[:2], *x[1].stride()[:2],
            G=groups, R=rank, N=n, ROWS=triton.next_power_of_2(groups * rank),
            HALVE=halve, num_warps=4,
        )  # fmt: skip


def states_backward(x: Pair, weights: Pair, given: Pair, out: Pair, halve: bool) -> Pair:
    """Write the gradients of keys and queries; return those of the norms' weights, in fp32.

    Args:
        x: those of `states`.
        weights: those of `states`.
        given: the gradients of the results of `states`, `[b, l, R, g, n]`, contiguous.
        out: `[b, l, g, R, n]`, contiguous.
        halve: that of `states`.
    """
    b, length, groups, rank, n = x[0].shape
    programs = triton.cdiv(b * length, TOKENS)
    sums = torch.empty(2, programs, n, dtype=torch.float32, device=x[0].device)
    if programs:
        _states_backward_kernel[(programs, 2)](
            *x, *(each.contiguous() for each in weights), *given, *out, sums, b * length, length,
            *x[0].stride()[:2], *x[1].stride()[:2], G=groups, R=rank, N=n,
            ROWS=triton.next_power_of_2(groups * rank), TOKENS=TOKENS, HALVE=halve, num_warps=4,
        )  # fmt: skip
    dw_keys, dw_queries = sums.sum(1)
    return dw_keys, dw_queries


def heads(
    x: tuple[Tensor, Tensor, Tensor],
    dt_bias: Tensor,
    angles: Tensor,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    definition: Definition,
    spread: bool,
) -> None:
    """Write log a, dt and the trapezoid's share `[b, h, l]`, and angles `[b, l, h, k]`.

    Args:
        x: dt, decay and trap of `naive.Inputs`; the last axis is contiguous.
        dt_bias: `[h]`.
        angles: `[b, l, k]`; the last axis is contiguous.
        out: contiguous, in the order above.
        definition: of A.
        spread: whether the angles are written.
    """
    b, length, count = x[0].shape
    width = angles.size(-1)
    if b * length:
        grid = (triton.cdiv(length, TOKENS), triton.cdiv(count, HEADS), b)
        strides = [stride for each in (*x, angles) for stride in each.stride()[:2]]
        _heads_kernel[grid](
            *x, dt_bias.contiguous(), angles, *out, length, *strides, H=count, K=width,
            ANGLES=triton.next_power_of_2(width), HEAVY_TAIL=definition == "heavy_tail",
            SPREAD=spread, TOKENS=TOKENS, HEADS=HEADS, num_warps=4,
        )  # fmt: skip


def heads_backward(
    x: Pair,
    dt_bias: Tensor,
    given: tuple[Tensor, ...],
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    definition: Definition,
    spread: bool,
) -> Tensor:
    """Write the gradients of dt, decay, trap and angles; return that of the bias `[h]`, in fp32.

    Args:
        x: dt and decay of `heads`.
        dt_bias: `[h]`.
        given: the gradients of the results of `heads`, contiguous.
        out: contiguous, in the order above.
        definition: of A.
        spread: whether the gradient of the angles is read and written.
    """
    b, length, count = x[0].shape
    width = out[3].size(-1)
    blocks = triton.cdiv(length, TOKENS)
    sums = torch.empty(b * blocks, count, dtype=torch.float32, device=dt_bias.device)
    if b * blocks:
        _heads_backward_kernel[(blocks, b)](
            *x, dt_bias.contiguous(), *given, *out, sums, length,
            *x[0].stride()[:2], *x[1].stride()[:2],
            H=count, K=width, ANGLES=triton.next_power_of_2(width),
            HEAVY_TAIL=definition == "heavy_tail", SPREAD=spread, TOKENS=TOKENS, HEADS=HEADS,
            num_warps=4,
        )  # fmt: skip
    return sums.sum(0)
