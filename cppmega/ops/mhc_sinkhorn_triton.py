"""Sinkhorn of small matrices in registers, forward and backward: one token per lane.

Every step divides rows or columns, so the matrix after any number of steps is the first one between
two diagonal scales: `M[i, j] = u[i] * a[i, j] * v[j]`. Only the scales change from step to step. So
it is in the backward: of the gradient times `u[i] * v[j]`, called e, a step subtracts a product of
two vectors, and neither a division nor the epsilon occurs in it. The backward needs the scales of
all steps in reverse. It computes a few steps anew from the beginning, goes back through them, and
takes the few before; nothing goes through memory, whatever the number of iterations.

`cppmega.ops.mhc_reference.sinkhorn` is the plain form.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.mhc_reference import EPS

SINKHORN_EPS = tl.constexpr(EPS)

LANES = 64
"""Tokens of one program, each of which is a lane's."""

WARPS = LANES // 32


@triton.jit  # type: ignore[untyped-decorator]
def empty():  # type: ignore[no-untyped-def]
    """A tuple to add to; written out, its type would be that of the empty tuple."""
    return ()


@triton.jit  # type: ignore[untyped-decorator]
def row(at, here, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tuple of the `COUNT` values that follow each address."""
    found = empty()
    for e in tl.static_range(COUNT):
        found = found + (tl.load(at + e, mask=here, other=0.0),)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def softmax(a, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Softmax of the rows of the tuple of N * N values."""
    out = empty()
    for i in tl.static_range(N):
        most = a[i * N]
        for j in tl.static_range(1, N):
            most = tl.maximum(most, a[i * N + j])
        total = tl.exp(a[i * N] - most)
        for j in tl.static_range(1, N):
            total += tl.exp(a[i * N + j] - most)
        for j in tl.static_range(N):
            out = out + (tl.exp(a[i * N + j] - most) / total,)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def raised(a, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The matrix that Sinkhorn starts from: the softmax plus epsilon."""
    out = empty()
    for e in tl.static_range(N * N):
        out = out + (a[e] + SINKHORN_EPS,)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _rescaled(scale, a, other, N: tl.constexpr, STEP: tl.constexpr, ACROSS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales after a division by the sums; `a[STEP * i + ACROSS * j]`, j is summed over."""
    out = empty()
    for i in tl.static_range(N):
        total = a[STEP * i] * other[0]
        for j in tl.static_range(1, N):
            total += a[STEP * i + ACROSS * j] * other[j]
        out = out + (scale[i] / (scale[i] * total + SINKHORN_EPS),)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def scales(a, pairs, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales of rows and columns after the first division of columns and `pairs` of both."""
    u = empty()
    for _ in tl.static_range(N):
        u = u + (a[0] * 0.0 + 1.0,)
    v = _rescaled(u, a, u, N, 1, N)
    for _ in range(pairs):
        u = _rescaled(u, a, v, N, N, 1)
        v = _rescaled(v, a, u, N, 1, N)
    return u, v


@triton.jit  # type: ignore[untyped-decorator]
def doubly_stochastic(a, iterations, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sinkhorn of the tuple of N * N logits."""
    start = raised(softmax(a, N), N)
    u, v = scales(start, iterations - 1, N)
    out = empty()
    for e in tl.static_range(N * N):
        out = out + (u[e // N] * start[e] * v[e % N],)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _without(e, a, scale, other, live, N: tl.constexpr, STEP: tl.constexpr, ACROSS: tl.constexpr):  # type: ignore[no-untyped-def]
    """e before a division that gave `scale`; as it was where not `live`."""
    parts = empty()
    for i in tl.static_range(N):
        total = e[STEP * i] * a[STEP * i]
        for j in tl.static_range(1, N):
            total += e[STEP * i + ACROSS * j] * a[STEP * i + ACROSS * j]
        parts = parts + (tl.where(live, total * scale[i], 0.0),)
    out = empty()
    for at in tl.static_range(N * N):
        out = out + (e[at] - parts[(at // STEP) % N] * other[(at // ACROSS) % N],)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _part(history, at, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales at one place of a history."""
    out = empty()
    for i in tl.static_range(N):
        out = out + (history[at * N + i],)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def gradient_of_logits(a, gradient, iterations, N: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of the logits from that of the result; STEPS iterations are kept at a time."""
    smooth = softmax(a, N)
    start = raised(smooth, N)
    pairs = iterations - 1
    u, v = scales(start, pairs, N)
    e = empty()
    for at in tl.static_range(N * N):
        e = e + (gradient[at] * u[at // N] * v[at % N],)
    parts = tl.cdiv(pairs, STEPS)
    for part in range(parts):
        first = (parts - 1 - part) * STEPS
        u, v = scales(start, first, N)
        rows, columns = u, v
        for _ in tl.static_range(STEPS):
            u = _rescaled(u, start, v, N, N, 1)
            v = _rescaled(v, start, u, N, 1, N)
            rows = rows + u
            columns = columns + v
        for back in tl.static_range(STEPS):
            k: tl.constexpr = STEPS - 1 - back
            live = first + k < pairs
            u = _part(rows, k + 1, N)
            e = _without(e, start, _part(columns, k + 1, N), u, live, N, 1, N)
            e = _without(e, start, u, _part(columns, k, N), live, N, N, 1)
    u, v = scales(start, 0, N)
    e = _without(e, start, v, u, True, N, 1, N)
    out = empty()
    for i in tl.static_range(N):
        inner = e[i * N] * smooth[i * N]
        for j in tl.static_range(1, N):
            inner += e[i * N + j] * smooth[i * N + j]
        for j in tl.static_range(N):
            out = out + (smooth[i * N + j] * (e[i * N + j] - inner),)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def stored(at, here, values, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a tuple of `COUNT` values behind each address."""
    for e in tl.static_range(COUNT):
        tl.store(at + e, values[e], mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _sinkhorn_kernel(logits, out, tokens, iterations, N: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    here = token < tokens
    a = row(logits + token * (N * N), here, N * N)
    stored(out + token * (N * N), here, doubly_stochastic(a, iterations, N), N * N)


@triton.jit  # type: ignore[untyped-decorator]
def _sinkhorn_backward_kernel(  # type: ignore[no-untyped-def]
    logits, gradient, out, tokens, iterations,
    N: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    here = token < tokens
    a = row(logits + token * (N * N), here, N * N)
    given = row(gradient + token * (N * N), here, N * N)
    found = gradient_of_logits(a, given, iterations, N, STEPS)
    stored(out + token * (N * N), here, found, N * N)


def steps_kept(n: int) -> int:
    """Iterations whose scales the backward keeps in registers at a time."""
    return 4 if n < 8 else 2


@torch.library.custom_op("cppmega::mhc_sinkhorn", mutates_args=("out",))
def sinkhorn(logits: Tensor, out: Tensor, iterations: int) -> None:
    """Sinkhorn of `[T, n, n]` in fp32 into `out` of the same shape; both contiguous."""
    tokens, n = logits.shape[:2]
    if tokens:
        _sinkhorn_kernel[(triton.cdiv(tokens, LANES),)](
            logits, out, tokens, iterations, N=n, LANES=LANES, num_warps=WARPS
        )


@torch.library.custom_op("cppmega::mhc_sinkhorn_backward", mutates_args=("out",))
def sinkhorn_backward(logits: Tensor, gradient: Tensor, out: Tensor, iterations: int) -> None:
    """The gradient of the logits into `out`; all `[T, n, n]`, fp32 and contiguous."""
    tokens, n = logits.shape[:2]
    if tokens:
        _sinkhorn_backward_kernel[(triton.cdiv(tokens, LANES),)](
            logits, gradient, out, tokens, iterations,
            N=n, STEPS=steps_kept(n), LANES=LANES, num_warps=WARPS,
        )  # fmt: skip
