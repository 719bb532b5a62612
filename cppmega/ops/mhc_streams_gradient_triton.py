"""One pass over the streams for the gradients of projection and aggregation, and phi's.

The gradient of the streams has four parts: what the update of the site began, the aggregation's,
the projection's and the norm's. They are added in fp32 and rounded once, in the storage of the
first. The same programs sum up the gradient of phi: each has some columns of one stream and a range
of tokens, and phi's columns stay with it. What they found is added in one order, straight into
Megatron's fp32 buffer if there is one. The workspace is `RANGES` times the size of phi at most.

`cppmega.ops.mhc_reference` has the plain forms, whose gradient this is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.mhc_projection_triton import padded, product

TOKENS = 64
"""Tokens of one step of a program."""

RANGES = 8
"""Ranges into which the tokens are split at most."""

ELEMENTS = 1024
"""Of phi, for a program that adds up its gradient."""

WARPS = 4


def _columns(n: int, dtype: torch.dtype) -> int:
    """Columns of one program: less where the logits are many, or the streams wide.

    Of bf16 at n of 4 the fastest on an H200 of 32 to 256 columns, 32 to 128 tokens and four or
    eight warps; elsewhere what the shared memory of sm_120 takes.
    """
    if n == 8:
        return 32
    return 64 if dtype == torch.float32 else 128


@triton.jit  # type: ignore[untyped-decorator]
def _streams_gradient_kernel(  # type: ignore[no-untyped-def]
    streams, phi, d_values, h_pre, gradient, d_streams, parts, tokens, each, C: tl.constexpr,
    N: tl.constexpr, V: tl.constexpr, PADDED: tl.constexpr, BEGUN: tl.constexpr,
    AGGREGATED: tl.constexpr, PHI: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    # The streams of the same columns run beside each other: they share the aggregate's gradient.
    i = tl.program_id(0) % N
    c = (tl.program_id(0) // N) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < C
    v = tl.arange(0, PADDED)
    of_phi = v.to(tl.int64)[:, None] * (N * C) + i * C + c[None, :]
    known = (v < V)[:, None] & inside[None, :]
    w = tl.load(phi + of_phi, mask=known, other=0.0)
    d_phi = tl.zeros((PADDED, COLUMNS), tl.float32)
    first = tl.program_id(1) * each
    for begin in range(first, tl.minimum(first + each, tokens), TOKENS):
        token = tl.cast(begin, tl.int64) + tl.arange(0, TOKENS)
        here = token < tokens
        mask = here[:, None] & inside[None, :]
        at = (token[:, None] * N + i) * C + c[None, :]
        x = tl.load(streams + at, mask=mask, other=0.0)
        d = tl.load(
            d_values + token[:, None] * PADDED + v[None, :],
            mask=here[:, None] & (v <= V)[None, :],
            other=0.0,
        )
        of_norm = tl.load(d_values + token * PADDED + V, mask=here, other=0.0)
        total = of_norm[:, None] * x.to(tl.float32)
        if BEGUN:
            total += tl.load(d_streams + at, mask=mask, other=0.0).to(tl.float32)
        if AGGREGATED:
            near = token[:, None] * C + c[None, :]
            g = tl.load(gradient + near, mask=mask, other=0.0).to(tl.float32)
            total += tl.load(h_pre + token * N + i, mask=here, other=0.0)[:, None] * g
        total = product(d, w, total, "")  # TF32 alone would bias the rounding of bf16
        tl.store(d_streams + at, total.to(d_streams.dtype.element_ty), mask=mask)
        if PHI:
            d_phi = product(tl.trans(d), x, d_phi, EXACT)
    if PHI:
        of_range = parts + tl.program_id(1).to(tl.int64) * (V * N * C)
        tl.store(of_range + of_phi, d_phi, mask=known)


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


def ranges(tokens: int) -> tuple[int, int]:
    """Into how many ranges the tokens are split, and the tokens of each."""
    each = max(1, triton.cdiv(tokens, TOKENS * RANGES)) * TOKENS
    return triton.cdiv(tokens, each), each


@torch.library.custom_op("cppmega::mhc_streams_gradient", mutates_args=("d_streams", "parts"))
def streams_gradient(
    streams: Tensor,
    phi: Tensor,
    d_values: Tensor,
    h_pre: Tensor | None,
    gradient: Tensor | None,
    d_streams: Tensor,
    parts: Tensor,
    begun: bool,
) -> None:
    """The gradient of the streams, and the parts of phi's.

    Args:
        streams: `[T, n, C]`.
        phi: `[n * n + 2 * n, n * C]`, fp32.
        d_values: `[T, padded(n)]`, of `mhc_weights_triton.weights_backward`.
        h_pre: `[T, n]`, fp32, and
        gradient: `[T, C]`, of the aggregate, both None if nothing was aggregated.
        d_streams: `[T, n, C]`; with `begun`, what it contains is a part of the gradient.
        parts: `[ranges(T), n * n + 2 * n, n * C]`, fp32; without elements if it is not wanted.
    """
    tokens, n, c = streams.shape
    if tokens:
        count, each = ranges(tokens)
        step = _columns(n, streams.dtype)
        bf16 = streams.dtype == torch.bfloat16
        _streams_gradient_kernel[(triton.cdiv(c, step) * n, count)](
            streams, phi, d_values, d_values if h_pre is None else h_pre,
            streams if gradient is None else gradient, d_streams, parts, tokens, each,
            C=c, N=n, V=len(phi), PADDED=padded(n), BEGUN=begun, AGGREGATED=gradient is not None,
            PHI=parts.numel() > 0, TOKENS=TOKENS, COLUMNS=step, EXACT="right" if bf16 else "",
            num_warps=WARPS, num_stages=2,
        )  # fmt: skip


@torch.library.custom_op("cppmega::mhc_phi_gradient", mutates_args=("out",))
def phi_gradient(parts: Tensor, out: Tensor, add: bool) -> None:
    """The sum of `parts` into `out`, or with `add` to what it contains; fp32, contiguous."""
    size = out.numel()
    _phi_gradient_kernel[(triton.cdiv(size, ELEMENTS),)](
        parts, out, size, len(parts), ADD=add, ELEMENTS=ELEMENTS, num_warps=WARPS
    )
