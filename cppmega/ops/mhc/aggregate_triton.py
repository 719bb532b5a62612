"""The weighted sum of the streams, and the gradients of streams and weights.

- `_aggregate_kernel`: grid tokens x blocks of COLUMNS; a program sums the same columns of all n
  streams of a token in fp32. Streams are read once, the aggregate is written once.
- `_aggregate_backward_kernel`: grid tokens; a program walks along the columns and keeps the n
  gradients of the weights in registers, so that they are summed in a fixed order. Streams and dO
  are read once, the gradient of the streams, if wanted, is written once.

Memory bandwidth limits both: on an H200 they run at the rate of a copy
(`benchmarks/results/mhc_designs.md`).

`cppmega.ops.mhc.naive.aggregate` is the reference implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mhc.sinkhorn_triton import empty

COLUMNS = 1024
"""Columns per program of the forward, and per step of the backward."""

WARPS = 4


@on_its_device
@triton.jit
def _aggregate_kernel(streams, h_pre, out, C: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr):
    PIECES: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    c = (tl.program_id(0) % PIECES) * COLUMNS + tl.arange(0, COLUMNS)
    mask = c < C
    acc = tl.zeros((COLUMNS,), tl.float32)
    for i in tl.static_range(N):
        x = tl.load(streams + (token * N + i) * C + c, mask=mask, other=0.0).to(tl.float32)
        acc += tl.load(h_pre + token * N + i) * x
    tl.store(out + token * C + c, acc.to(out.dtype.element_ty), mask=mask)


@on_its_device
@triton.jit
def _aggregate_backward_kernel(
    streams, h_pre, do, d_streams, d_pre, C: tl.constexpr, N: tl.constexpr,
    STREAMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    acc = empty()
    for _ in tl.static_range(N):
        acc = acc + (tl.zeros((COLUMNS,), tl.float32),)
    for first in range(0, C, COLUMNS):
        c = first + tl.arange(0, COLUMNS)
        mask = c < C
        g = tl.load(do + token * C + c, mask=mask, other=0.0).to(tl.float32)
        next_acc = empty()
        for i in tl.static_range(N):
            offs = (token * N + i) * C + c
            x = tl.load(streams + offs, mask=mask, other=0.0).to(tl.float32)
            next_acc = next_acc + (acc[i] + g * x,)
            if STREAMS:
                d = tl.load(h_pre + token * N + i) * g
                tl.store(d_streams + offs, d.to(d_streams.dtype.element_ty), mask=mask)
        acc = next_acc
    for i in tl.static_range(N):
        tl.store(d_pre + token * N + i, tl.sum(acc[i], 0))


@torch.library.custom_op("cppmega::mhc_aggregate", mutates_args=("out",))
def aggregate(streams: Tensor, h_pre: Tensor, out: Tensor) -> None:
    """Write the sum over the streams `[T, n, C]`, weighted by `[T, n]`, to `out` `[T, C]`."""
    tokens, n, c = streams.shape
    if tokens:
        _aggregate_kernel[(tokens * triton.cdiv(c, COLUMNS),)](
            streams, h_pre, out, C=c, N=n, COLUMNS=COLUMNS, num_warps=WARPS
        )


@torch.library.custom_op("cppmega::mhc_aggregate_backward", mutates_args=("d_streams", "d_pre"))
def aggregate_backward(
    streams: Tensor, h_pre: Tensor, gradient: Tensor, d_streams: Tensor, d_pre: Tensor
) -> None:
    """Write the gradients of `aggregate`, from that of its result, to tensors of their shapes."""
    _launch_backward(streams, h_pre, gradient, d_streams, d_pre)


@torch.library.custom_op("cppmega::mhc_aggregate_dots", mutates_args=("d_pre",))
def aggregate_dots(streams: Tensor, gradient: Tensor, d_pre: Tensor) -> None:
    """Write only the gradient of the weights, to `d_pre` `[T, n]`."""
    _launch_backward(streams, d_pre, gradient, None, d_pre)


def _launch_backward(
    streams: Tensor, h_pre: Tensor, gradient: Tensor, d_streams: Tensor | None, d_pre: Tensor
) -> None:
    tokens, n, c = streams.shape
    if tokens:
        _aggregate_backward_kernel[(tokens,)](
            streams, h_pre, gradient, streams if d_streams is None else d_streams, d_pre,
            C=c, N=n, STREAMS=d_streams is not None, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
