"""The weighted sum of the streams, and the gradients of streams and weights.

Each element is read once and summed in fp32. A program of the forward processes a piece of one
token's columns; a program of the backward processes an entire token, so that the weights' gradients
are summed in a fixed order.

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
@triton.jit  # type: ignore[untyped-decorator]
def _aggregate_kernel(  # type: ignore[no-untyped-def]
    streams, h_pre, out, C: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr
):
    PIECES: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    token = (tl.program_id(0) // PIECES).to(tl.int64)
    c = (tl.program_id(0) % PIECES) * COLUMNS + tl.arange(0, COLUMNS)
    here = c < C
    total = tl.zeros((COLUMNS,), tl.float32)
    for i in tl.static_range(N):
        x = tl.load(streams + (token * N + i) * C + c, mask=here, other=0.0).to(tl.float32)
        total += tl.load(h_pre + token * N + i) * x
    tl.store(out + token * C + c, total.to(out.dtype.element_ty), mask=here)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _aggregate_backward_kernel(  # type: ignore[no-untyped-def]
    streams, h_pre, gradient, d_streams, d_pre, C: tl.constexpr, N: tl.constexpr,
    STREAMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    sums = empty()
    for _ in tl.static_range(N):
        sums = sums + (tl.zeros((COLUMNS,), tl.float32),)
    for first in range(0, C, COLUMNS):
        c = first + tl.arange(0, COLUMNS)
        here = c < C
        g = tl.load(gradient + token * C + c, mask=here, other=0.0).to(tl.float32)
        added = empty()
        for i in tl.static_range(N):
            at = (token * N + i) * C + c
            x = tl.load(streams + at, mask=here, other=0.0).to(tl.float32)
            added = added + (sums[i] + g * x,)
            if STREAMS:
                d = tl.load(h_pre + token * N + i) * g
                tl.store(d_streams + at, d.to(d_streams.dtype.element_ty), mask=here)
        sums = added
    for i in tl.static_range(N):
        tl.store(d_pre + token * N + i, tl.sum(sums[i], 0))


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
