"""One pass over the streams for the gradients of projection and aggregation, and that of phi.

The gradient of the streams has four parts: the one begun by the site's update, and those of the
aggregation, the projection and the norm. They are added in fp32 and rounded once, in the storage of
the first. The same programs sum the gradient of phi: each processes some columns of one stream and
a range of tokens, and keeps its columns of phi. Their results are summed in a fixed order, directly
into Megatron's fp32 buffer if there is one. The workspace is at most `RANGES` times the size of
phi.

The values added to the product with phi are read in the layout of its accumulator, two columns per
thread. The copy engine (TMA; before Hopper, Triton replaces it with plain copies) swizzles tiles in
shared memory so that these reads have no bank conflicts, which would make the entire pass 1.4 times
as long (`benchmarks/results/mhc_designs.md`).

`cppmega.ops.mhc.naive` has the functions of which this is the gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mhc.parts_triton import PART, product
from cppmega.ops.mhc.projection_triton import padded

RANGES = 8
"""Maximum number of ranges into which the tokens are split."""

ELEMENTS = 1024
"""Elements of phi per program that sums its gradient."""

WARPS = 4


def tile(n: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Tokens per step of a program, its columns, and pipeline stages.

    These are the fastest on an H200 of those that fit in the 99 KiB of sm_120.
    """
    bf16 = dtype == torch.bfloat16
    if n == 8:
        return 64 if bf16 else 32, 32, 2
    return (64, 64, 3 if bf16 else 2) if n == 4 else (128 if bf16 else 64, 64, 2)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _streams_gradient_kernel(  # type: ignore[no-untyped-def]
    streams, phi, d_values, d_parts, h_pre, gradient, begun, d_streams, parts, tokens, each,
    C: tl.constexpr, N: tl.constexpr, V: tl.constexpr, PADDED: tl.constexpr, BEGUN: tl.constexpr,
    AGGREGATED: tl.constexpr, PHI: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    IN_PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Programs for the same columns of different streams are adjacent, as they share the aggregate's
    # gradient.
    i = tl.program_id(0) % N
    near = (tl.program_id(0) // N) * COLUMNS
    c = near + tl.arange(0, COLUMNS)
    inside = c < C
    v = tl.arange(0, PADDED)
    known, row = v < V, v * (N * C)
    of_phi = phi + row[:, None] + (i * C + c)[None, :]
    w = tl.load(of_phi, mask=known[:, None] & inside[None, :], other=0.0)
    w_middle = w
    if IN_PARTS:
        w_middle = tl.load(of_phi + V * N * C, mask=known[:, None] & inside[None, :], other=0.0)
    d_phi = tl.zeros((COLUMNS, PADDED), tl.float32)
    size = tl.cast(tokens, tl.int64) * PADDED
    first = tl.program_id(1) * each
    for begin in tl.range(first, tl.minimum(first + each, tokens), TOKENS, num_stages=STAGES):
        token = tl.cast(begin, tl.int64) + tl.arange(0, TOKENS)
        here = token < tokens
        # Columns beyond C belong to the next stream, and are not stored.
        x = streams.load([begin, i * C + near])
        of_norm = tl.load(d_values + token * PADDED + V, mask=here, other=0.0)
        total = of_norm[:, None] * x.to(tl.float32)
        if BEGUN:
            total += begun.load([begin, i * C + near]).to(tl.float32)
        if AGGREGATED:
            g = gradient.load([begin, near]).to(tl.float32)
            total += tl.load(h_pre + token * N + i, mask=here, other=0.0)[:, None] * g
        each_d = token[:, None] * PADDED + v[None, :]
        of_d = here[:, None] & known[None, :]
        if IN_PARTS:
            high = tl.load(d_parts + each_d, mask=of_d, other=0.0)
            middle = tl.load(d_parts + size + each_d, mask=of_d, other=0.0)
            low = tl.load(d_parts + 2 * size + each_d, mask=of_d, other=0.0)
            # Two parts of each, without the product of the second: the result is rounded to bf16.
            total = tl.dot(high.to(PART), w.to(PART), total)
            total = tl.dot(middle.to(PART), w.to(PART), total)
            total = tl.dot(high.to(PART), w_middle.to(PART), total)
            if PHI:
                d_phi += product(tl.trans(x), high, middle, low)
        else:
            d = tl.load(d_values + each_d, mask=of_d, other=0.0)
            # TF32 alone would bias the rounding.
            total = tl.dot(d, w, total, input_precision="tf32x3")
            if PHI:
                turned = tl.trans(x.to(tl.float32))
                d_phi = tl.dot(turned, d, d_phi, input_precision="tf32x3")
        at = (token[:, None] * N + i) * C + c[None, :]
        mask = here[:, None] & inside[None, :]
        tl.store(d_streams + at, total.to(d_streams.dtype.element_ty), mask=mask)
    if PHI:
        of_range = parts + tl.program_id(1).to(tl.int64) * (V * N * C)
        at = of_range + row[None, :] + (i * C + c)[:, None]
        tl.store(at, d_phi, mask=inside[:, None] & known[None, :])


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _phi_gradient_kernel(  # type: ignore[no-untyped-def]
    parts, out, size, count, ADD: tl.constexpr, ELEMENTS: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    here = at < size
    total = tl.zeros((ELEMENTS,), tl.float32)
    for part in range(count):
        total += tl.load(parts + tl.cast(part, tl.int64) * size + at, mask=here, other=0.0)
    if ADD:
        total += tl.load(out + at, mask=here, other=0.0)
    tl.store(out + at, total, mask=here)


def ranges(tokens: int, n: int, dtype: torch.dtype) -> tuple[int, int]:
    """The number of ranges into which the tokens are split, and the tokens of each."""
    step = tile(n, dtype)[0]
    each = max(1, triton.cdiv(tokens, step * RANGES)) * step
    return triton.cdiv(tokens, each), each


@torch.library.custom_op("cppmega::mhc_streams_gradient", mutates_args=("d_streams", "parts"))
def streams_gradient(
    streams: Tensor,
    phi: Tensor,
    d_values: Tensor,
    d_parts: Tensor,
    h_pre: Tensor | None,
    gradient: Tensor | None,
    d_streams: Tensor,
    parts: Tensor,
    begun: bool,
) -> None:
    """Compute the gradient of the streams, and the partial sums of that of phi.

    Args:
        streams: `[T, n, C]`.
        phi: `[n * n + 2 * n, n * C]`, fp32, or its parts; see `mhc_parts_triton.factor`.
        d_values: `[T, padded(n)]`, of `mhc_weights_triton.weights_backward`.
        d_parts: `[3, T, padded(n)]`, of the same, if phi is in parts.
        h_pre: `[T, n]`, fp32; None if nothing was aggregated.
        gradient: `[T, C]`, of the aggregate; None if nothing was aggregated.
        d_streams: `[T, n, C]`; with `begun`, its contents are a part of the gradient.
        parts: `[ranges(T, n, type), n * n + 2 * n, n * C]`, fp32; without elements if not needed.
    """
    tokens, n, c = streams.shape
    if tokens:
        count, each = ranges(tokens, n, streams.dtype)
        step, columns, stages = tile(n, streams.dtype)
        shape = [step, columns]
        seen = _tiles(streams, shape)
        _streams_gradient_kernel[(triton.cdiv(c, columns) * n, count)](
            seen, phi, d_values, d_parts, d_values if h_pre is None else h_pre,
            seen if gradient is None else _tiles(gradient, shape),
            _tiles(d_streams, shape) if begun else seen, d_streams, parts, tokens, each,
            C=c, N=n, V=n * n + 2 * n, PADDED=padded(n), BEGUN=begun,
            AGGREGATED=gradient is not None, PHI=parts.numel() > 0, TOKENS=step, COLUMNS=columns,
            IN_PARTS=phi.ndim == 3, STAGES=stages, num_warps=WARPS,
        )  # fmt: skip


def _tiles(x: Tensor, shape: list[int]) -> TensorDescriptor:
    """A descriptor of tiles of tokens and columns for TMA, which requires 16-byte alignment."""
    x = x.flatten(1)
    return TensorDescriptor.from_tensor(x if x.data_ptr() % 16 == 0 else x.clone(), shape)


@torch.library.custom_op("cppmega::mhc_phi_gradient", mutates_args=("out",))
def phi_gradient(parts: Tensor, out: Tensor, add: bool) -> None:
    """Write the sum of `parts` to `out` or, with `add`, add it there; fp32, contiguous."""
    size = out.numel()
    _phi_gradient_kernel[(triton.cdiv(size, ELEMENTS),)](
        parts, out, size, len(parts), ADD=add, ELEMENTS=ELEMENTS, num_warps=WARPS
    )
