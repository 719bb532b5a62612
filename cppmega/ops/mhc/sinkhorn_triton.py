"""Sinkhorn of small matrices in registers, forward and backward: one token per lane, or per few.

Grid: blocks of tokens. A program holds tiles `[n, n, tokens]`; each matrix is read once and written
once, whatever the number of iterations. Triton assigns the last axis to the lanes first: with as
many tokens as lanes, a lane holds a complete matrix and neither sum needs another lane. Lanes share
larger matrices, which leaves registers for the scales that the backward keeps. The chain of
divisions limits both kernels: instructions and registers, not memory
(`benchmarks/results/mhc_designs.md`).

Every step divides rows or columns, so the matrix after any number of steps is the first one between
two diagonal scales: `M[i, j] = u[i] * a[i, j] * v[j]`. Only the scales change from step to step.
The backward works the same way: with e the gradient times `u[i] * v[j]`, a step subtracts an outer
product from e, and neither a division nor the epsilon occurs in it. It needs the scales of all
steps in reverse, so it recomputes a block of steps from the beginning, walks back through them, and
continues with the block before.

`cppmega.ops.mhc.naive.sinkhorn` is the reference implementation.
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
    """How tokens are assigned to programs.

    Attributes:
        tokens: tokens of one program; with fewer tokens than lanes, some lanes share a token.
        warps: warps of one program.
        steps: the most iterations whose scales the backward keeps in registers at a time.
    """

    tokens: int
    warps: int
    steps: int


def tile(n: int) -> Tile:
    """The fastest tile for Sinkhorn's backward on an H200, at 20 iterations."""
    if n == 4:
        return Tile(16, 2, 20)
    return Tile(8, 2, 10) if n == 8 else Tile(64, 2, 20)


def kept(n: int, iterations: int) -> dict[str, int]:
    """Split the iterations after the first division of columns into blocks for the backward.

    A block has STEPS iterations, each a division of rows and one of columns. With WHOLE, no block
    is shorter, and the kernel needs no comparisons.
    """
    pairs = iterations - 1
    count = triton.cdiv(pairs, tile(n).steps)
    steps = triton.cdiv(pairs, count) if count else 1
    return {"STEPS": steps, "WHOLE": count > 0 and pairs % steps == 0}


@triton.jit
def empty():
    """An empty tuple to extend; a literal would keep the type of the empty tuple."""
    return ()


@triton.jit
def places(N: tl.constexpr):
    """Offsets of the entries of a matrix, `[N, N, 1]`."""
    i = tl.arange(0, N)
    return i[:, None, None] * N + i[None, :, None]


@triton.jit
def softmax(logits):
    """Softmax of the rows of `[N, N, T]`."""
    raised = tl.exp(logits - tl.max(logits, 1)[:, None, :])
    return raised / tl.sum(raised, 1)[:, None, :]


@triton.jit
def _divided(scales, sums):
    """The scales divided by the sums of the scaled rows or columns.

    Squaring the reciprocal square root has a relative error of at most 2.5e-7 and takes fewer
    instructions than a division (`benchmarks/results/mhc_designs.md`).
    """
    root = tl.rsqrt(scales * sums + SINKHORN_EPS)
    return scales * (root * root)


@triton.jit
def _of_rows(u, start, v):
    """The scales `[N, T]` of rows after a division by their sums."""
    return _divided(u, tl.sum(start * v[None, :, :], 1))


@triton.jit
def _of_columns(u, start, v):
    """The scales `[N, T]` of columns after a division by their sums."""
    return _divided(v, tl.sum(start * u[:, None, :], 0))


@triton.jit
def _scales(start, pairs):
    """Scales of rows and columns after the first division of columns and `pairs` of both."""
    one = tl.sum(start, 1) * 0.0 + 1.0
    u, v = one, _of_columns(one, start, one)
    for _ in range(pairs):
        u = _of_rows(u, start, v)
        v = _of_columns(u, start, v)
    return u, v


@triton.jit
def doubly_stochastic(logits, iterations):
    """Sinkhorn of the logits `[N, N, T]`."""
    start = softmax(logits) + SINKHORN_EPS
    u, v = _scales(start, iterations - 1)
    return u[:, None, :] * start * v[None, :, :]


@triton.jit
def _if(live, value, otherwise, ALWAYS: tl.constexpr):
    if ALWAYS:
        return value
    return tl.where(live, value, otherwise)


@triton.jit
def gradient_of_logits(logits, do, iterations, STEPS: tl.constexpr, WHOLE: tl.constexpr):
    """The gradient of the logits from that of the result; `kept` chooses STEPS and WHOLE."""
    smooth = softmax(logits)
    start = smooth + SINKHORN_EPS
    pairs = iterations - 1
    e = do
    parts = tl.maximum(tl.cdiv(pairs, STEPS), 1)
    for part in range(parts):
        first = (parts - 1 - part) * STEPS
        u, v = _scales(start, first)
        rows, columns = empty() + (u,), empty() + (v,)
        for step in tl.static_range(STEPS):
            live = first + step < pairs  # the last block may be shorter
            u = _if(live, _of_rows(u, start, v), u, WHOLE)
            v = _if(live, _of_columns(u, start, v), v, WHOLE)
            rows = rows + (u,)
            columns = columns + (v,)
        e = tl.where(part == 0, e * u[:, None, :] * v[None, :, :], e)
        for i in tl.static_range(STEPS):
            live = first + STEPS - i <= pairs
            u, v = rows[STEPS - i], columns[STEPS - i]
            dv = _if(live, tl.sum(e * start, 0) * v, 0.0, WHOLE)
            e -= dv[None, :, :] * u[:, None, :]
            du = _if(live, tl.sum(e * start, 1) * u, 0.0, WHOLE)
            e -= du[:, None, :] * columns[STEPS - 1 - i][None, :, :]
    u, v = _scales(start, 0)
    e -= (tl.sum(e * start, 0) * v)[None, :, :]
    return smooth * (e - tl.sum(e * smooth, 1)[:, None, :])


@on_its_device
@triton.jit
def _sinkhorn_kernel(logits, out, tokens, iterations, N: tl.constexpr, LANES: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)[None, None, :]
    offs = token * (N * N) + places(N)
    a = tl.load(logits + offs, mask=token < tokens, other=0.0)
    tl.store(out + offs, doubly_stochastic(a, iterations), mask=token < tokens)


@on_its_device
@triton.jit
def _sinkhorn_backward_kernel(
    logits, do, out, tokens, iterations,
    N: tl.constexpr, STEPS: tl.constexpr, WHOLE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)[None, None, :]
    offs = token * (N * N) + places(N)
    a = tl.load(logits + offs, mask=token < tokens, other=0.0)
    b_do = tl.load(do + offs, mask=token < tokens, other=0.0)
    d_logits = gradient_of_logits(a, b_do, iterations, STEPS, WHOLE)
    tl.store(out + offs, d_logits, mask=token < tokens)


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
