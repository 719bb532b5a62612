"""Sinkhorn of small matrices in registers, forward and backward: one token per lane, or per few.

The tiles are `[n, n, tokens]`: Triton gives the last axis to the lanes first. With as many tokens
as lanes, a lane has a whole matrix and neither sum needs another lane; the larger matrices are
shared by lanes, which leaves registers for the scales that the backward keeps.

Every step divides rows or columns, so the matrix after any number of steps is the first one between
two diagonal scales: `M[i, j] = u[i] * a[i, j] * v[j]`. Only the scales change from step to step. So
it is in the backward: of the gradient times `u[i] * v[j]`, called e, a step subtracts a product of
two vectors, and neither a division nor the epsilon occurs in it. The backward needs the scales of
all steps in reverse. It computes some steps anew from the beginning, goes back through them, and
takes those before; nothing goes through memory, whatever the number of iterations.

`cppmega.ops.mhc.naive.sinkhorn` is the plain form.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mhc.naive import EPS

SINKHORN_EPS = tl.constexpr(EPS)


class Tile(NamedTuple):
    """How the tokens are dealt to programs.

    Attributes:
        tokens: of one program; where they are fewer than its lanes, some lanes share a token.
        warps: of one program.
        steps: iterations whose scales the backward keeps in registers at a time, at most.
    """

    tokens: int
    warps: int
    steps: int


def tile(n: int) -> Tile:
    """The fastest for Sinkhorn's backward on an H200, at 20 iterations."""
    if n == 4:
        return Tile(16, 2, 20)
    return Tile(8, 2, 10) if n == 8 else Tile(64, 2, 20)


def kept(n: int, iterations: int) -> dict[str, int]:
    """How the backward splits the iterations after the first division of columns into parts.

    A part has STEPS iterations, each a division of rows and one of columns. If the parts are WHOLE,
    none of them is shorter, and the kernel needs no comparisons.
    """
    pairs = iterations - 1
    count = triton.cdiv(pairs, tile(n).steps)
    steps = triton.cdiv(pairs, count) if count else 1
    return {"STEPS": steps, "WHOLE": count > 0 and pairs % steps == 0}


@triton.jit  # type: ignore[untyped-decorator]
def empty():  # type: ignore[no-untyped-def]
    """A tuple to add to; written out, its type would be that of the empty tuple."""
    return ()


@triton.jit  # type: ignore[untyped-decorator]
def places(N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the entries of a matrix are, `[N, N, 1]`."""
    i = tl.arange(0, N)
    return i[:, None, None] * N + i[None, :, None]


@triton.jit  # type: ignore[untyped-decorator]
def softmax(logits):  # type: ignore[no-untyped-def]
    """Softmax of the rows of `[N, N, T]`."""
    raised = tl.exp(logits - tl.max(logits, 1)[:, None, :])
    return raised / tl.sum(raised, 1)[:, None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _divided(scales, sums):  # type: ignore[no-untyped-def]
    """The scales divided by the sums of the scaled rows or columns.

    Squaring the reciprocal square root has a relative error of at most 2.5e-7 and takes fewer
    instructions than a division (`benchmarks/results/mhc_designs.md`).
    """
    root = tl.rsqrt(scales * sums + SINKHORN_EPS)
    return scales * (root * root)


@triton.jit  # type: ignore[untyped-decorator]
def _of_rows(u, start, v):  # type: ignore[no-untyped-def]
    """The scales `[N, T]` of rows after a division by their sums."""
    return _divided(u, tl.sum(start * v[None, :, :], 1))


@triton.jit  # type: ignore[untyped-decorator]
def _of_columns(u, start, v):  # type: ignore[no-untyped-def]
    """The scales `[N, T]` of columns after a division by their sums."""
    return _divided(v, tl.sum(start * u[:, None, :], 0))


@triton.jit  # type: ignore[untyped-decorator]
def _scales(start, pairs):  # type: ignore[no-untyped-def]
    """Scales of rows and columns after the first division of columns and `pairs` of both."""
    one = tl.sum(start, 1) * 0.0 + 1.0
    u, v = one, _of_columns(one, start, one)
    for _ in range(pairs):
        u = _of_rows(u, start, v)
        v = _of_columns(u, start, v)
    return u, v


@triton.jit  # type: ignore[untyped-decorator]
def doubly_stochastic(logits, iterations):  # type: ignore[no-untyped-def]
    """Sinkhorn of the logits `[N, N, T]`."""
    start = softmax(logits) + SINKHORN_EPS
    u, v = _scales(start, iterations - 1)
    return u[:, None, :] * start * v[None, :, :]


@triton.jit  # type: ignore[untyped-decorator]
def _if(live, here, otherwise, ALWAYS: tl.constexpr):  # type: ignore[no-untyped-def]
    if ALWAYS:
        return here
    return tl.where(live, here, otherwise)


@triton.jit  # type: ignore[untyped-decorator]
def gradient_of_logits(  # type: ignore[no-untyped-def]
    logits, gradient, iterations, STEPS: tl.constexpr, WHOLE: tl.constexpr
):
    """The gradient of the logits from that of the result; `kept` chooses STEPS and WHOLE."""
    smooth = softmax(logits)
    start = smooth + SINKHORN_EPS
    pairs = iterations - 1
    e = gradient
    parts = tl.maximum(tl.cdiv(pairs, STEPS), 1)
    for part in range(parts):
        first = (parts - 1 - part) * STEPS
        u, v = _scales(start, first)
        rows, columns = empty() + (u,), empty() + (v,)
        for step in tl.static_range(STEPS):
            live = first + step < pairs  # the first part to be done may be shorter
            u = _if(live, _of_rows(u, start, v), u, WHOLE)
            v = _if(live, _of_columns(u, start, v), v, WHOLE)
            rows = rows + (u,)
            columns = columns + (v,)
        e = tl.where(part == 0, e * u[:, None, :] * v[None, :, :], e)
        for back in tl.static_range(STEPS):
            live = first + STEPS - back <= pairs
            u, v = rows[STEPS - back], columns[STEPS - back]
            of_columns = _if(live, tl.sum(e * start, 0) * v, 0.0, WHOLE)
            e -= of_columns[None, :, :] * u[:, None, :]
            of_rows = _if(live, tl.sum(e * start, 1) * u, 0.0, WHOLE)
            e -= of_rows[:, None, :] * columns[STEPS - 1 - back][None, :, :]
    u, v = _scales(start, 0)
    e -= (tl.sum(e * start, 0) * v)[None, :, :]
    return smooth * (e - tl.sum(e * smooth, 1)[:, None, :])


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _sinkhorn_kernel(logits, out, tokens, iterations, N: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)[None, None, :]
    at = token * (N * N) + places(N)
    a = tl.load(logits + at, mask=token < tokens, other=0.0)
    tl.store(out + at, doubly_stochastic(a, iterations), mask=token < tokens)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _sinkhorn_backward_kernel(  # type: ignore[no-untyped-def]
    logits, gradient, out, tokens, iterations,
    N: tl.constexpr, STEPS: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)[None, None, :]
    at = token * (N * N) + places(N)
    a = tl.load(logits + at, mask=token < tokens, other=0.0)
    given = tl.load(gradient + at, mask=token < tokens, other=0.0)
    found = gradient_of_logits(a, given, iterations, STEPS, WHOLE)
    tl.store(out + at, found, mask=token < tokens)


@torch.library.custom_op("cppmega::mhc_sinkhorn", mutates_args=("out",))
def sinkhorn(logits: Tensor, out: Tensor, iterations: int) -> None:
    """Sinkhorn of `[T, n, n]` in fp32 into `out` of the same shape; both contiguous."""
    tokens, n = logits.shape[:2]
    if tokens:
        lanes, warps, _ = tile(n)
        _sinkhorn_kernel[(triton.cdiv(tokens, lanes),)](
            logits, out, tokens, iterations, N=n, LANES=lanes, num_warps=warps
        )


@torch.library.custom_op("cppmega::mhc_sinkhorn_backward", mutates_args=("out",))
def sinkhorn_backward(logits: Tensor, gradient: Tensor, out: Tensor, iterations: int) -> None:
    """The gradient of the logits into `out`; all `[T, n, n]`, fp32 and contiguous."""
    tokens, n = logits.shape[:2]
    if tokens:
        lanes, warps, _ = tile(n)
        _sinkhorn_backward_kernel[(triton.cdiv(tokens, lanes),)](
            logits, gradient, out, tokens, iterations,
            N=n, **kept(n, iterations), LANES=lanes, num_warps=warps,
        )  # fmt: skip
