"""One pass over the streams for the gradients of projection and aggregation, and that of phi.

Grid: n streams x blocks of columns, x ranges of tokens (at most `RANGES`). A program holds its
columns of phi and of phi's gradient, `[PADDED, COLUMNS]` each, and walks along its tokens. The
gradient of the streams is the sum of four terms: the one begun by the site's update, and those of
aggregation, projection and norm. They are added in fp32 and rounded once, in the storage of the
first. Streams, the begun gradient and dO are read once (dO once per stream, from L2), the result is
written once. The partial gradients of phi are summed in a fixed order by `_phi_gradient_kernel`,
which reads them once, directly into Megatron's fp32 buffer if there is one; its grid is blocks of
phi's elements. The workspace is at most `RANGES` times the size of phi.

Memory bandwidth is the bound: with n = 4 the pass takes 1.2 times as long on an H200 as a copy of
what it moves. The values added to the product with phi are read in the layout of its accumulator,
two columns per thread. The copy engine (TMA; before Hopper, Triton replaces it with plain copies)
swizzles tiles in shared memory so that these reads have no bank conflicts, which would make the
entire pass 1.4 times as long (`benchmarks/results/mhc_designs.md`).

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
@triton.jit
def _streams_gradient_kernel(
    streams, phi, d_values, d_parts, h_pre, do, begun, d_streams, parts, tokens, each,
    C: tl.constexpr, N: tl.constexpr, V: tl.constexpr, PADDED: tl.constexpr, BEGUN: tl.constexpr,
    AGGREGATED: tl.constexpr, PHI: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    IN_PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Programs for the same columns of different streams are adjacent, as they share the aggregate's
    # gradient.
    i = tl.program_id(0) % N
    near = (tl.program_id(0) // N) * COLUMNS
    c = near + tl.arange(0, COLUMNS)
    mask_c = c < C
    v = tl.arange(0, PADDED)
    mask_v, row = v < V, v * (N * C)
    phi_ptrs = phi + row[:, None] + (i * C + c)[None, :]
    w = tl.load(phi_ptrs, mask=mask_v[:, None] & mask_c[None, :], other=0.0)
    w_middle = w
    if IN_PARTS:
        w_middle = tl.load(phi_ptrs + V * N * C, mask=mask_v[:, None] & mask_c[None, :], other=0.0)
    d_phi = tl.zeros((COLUMNS, PADDED), tl.float32)
    size = tl.cast(tokens, tl.int64) * PADDED
    first = tl.program_id(1) * each
    for begin in tl.range(first, tl.minimum(first + each, tokens), TOKENS, num_stages=STAGES):
        token = tl.cast(begin, tl.int64) + tl.arange(0, TOKENS)
        mask_t = token < tokens
        # Columns beyond C belong to the next stream, and are not stored.
        x = streams.load([begin, i * C + near])
        d_norm = tl.load(d_values + token * PADDED + V, mask=mask_t, other=0.0)
        dx = d_norm[:, None] * x.to(tl.float32)
        if BEGUN:
            dx += begun.load([begin, i * C + near]).to(tl.float32)
        if AGGREGATED:
            g = do.load([begin, near]).to(tl.float32)
            dx += tl.load(h_pre + token * N + i, mask=mask_t, other=0.0)[:, None] * g
        offs_d = token[:, None] * PADDED + v[None, :]
        mask_d = mask_t[:, None] & mask_v[None, :]
        if IN_PARTS:
            high = tl.load(d_parts + offs_d, mask=mask_d, other=0.0)
            middle = tl.load(d_parts + size + offs_d, mask=mask_d, other=0.0)
            low = tl.load(d_parts + 2 * size + offs_d, mask=mask_d, other=0.0)
            # Two parts of each, without the product of the second: the result is rounded to bf16.
            dx = tl.dot(high.to(PART), w.to(PART), dx)
            dx = tl.dot(middle.to(PART), w.to(PART), dx)
            dx = tl.dot(high.to(PART), w_middle.to(PART), dx)
            if PHI:
                d_phi += product(tl.trans(x), high, middle, low)
        else:
            d = tl.load(d_values + offs_d, mask=mask_d, other=0.0)
            # TF32 alone would bias the rounding.
            dx = tl.dot(d, w, dx, input_precision="tf32x3")
            if PHI:
                x_t = tl.trans(x.to(tl.float32))
                d_phi = tl.dot(x_t, d, d_phi, input_precision="tf32x3")
        offs = (token[:, None] * N + i) * C + c[None, :]
        mask = mask_t[:, None] & mask_c[None, :]
        tl.store(d_streams + offs, dx.to(d_streams.dtype.element_ty), mask=mask)
    if PHI:
        p_range = parts + tl.program_id(1).to(tl.int64) * (V * N * C)
        offs = p_range + row[None, :] + (i * C + c)[:, None]
        tl.store(offs, d_phi, mask=mask_c[:, None] & mask_v[None, :])


@on_its_device
@triton.jit
def _phi_gradient_kernel(parts, out, size, count, ADD: tl.constexpr, ELEMENTS: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = offs < size
    acc = tl.zeros((ELEMENTS,), tl.float32)
    for part in range(count):
        acc += tl.load(parts + tl.cast(part, tl.int64) * size + offs, mask=mask, other=0.0)
    if ADD:
        acc += tl.load(out + offs, mask=mask, other=0.0)
    tl.store(out + offs, acc, mask=mask)


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
        phi: `[n * n + 2 * n, n * C]`, fp32, or its parts; see `parts_triton.factor`.
        d_values: `[T, padded(n)]`, of `weights_triton.weights_backward`.
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
