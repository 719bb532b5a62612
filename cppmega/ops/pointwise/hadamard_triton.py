"""Walsh-Hadamard transform in one CUDA kernel that reads and writes each element once.

A program holds some rows in registers and runs all stages on them in fp32, with the sums of
`cppmega.ops.pointwise.hadamard` in the same order, so that the results are bitwise equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cppmega.ops.common.launch import on_its_device

LONGEST = 1 << 15
"""Longest row, in elements, that one program holds."""

_ELEMENTS = 1024
"""Elements per program, for rows that are shorter."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit  # type: ignore[untyped-decorator]
def butterflies(x, ROWS: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    """`x @ H` for a tile `[ROWS, N]` in registers, N = 2**STAGES."""
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, (ROWS, N >> (stage + 1), 2, 1 << stage))
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        sums = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
        x = tl.reshape(sums, (ROWS, N))
    return x


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _transform_kernel(  # type: ignore[no-untyped-def]
    source, out, scale, rows, N: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * N + tl.arange(0, N)[None, :]
    inside = row[:, None] < rows
    x = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    x = butterflies(x, ROWS, N, STAGES)
    tl.store(out + at, (x * scale).to(out.dtype.element_ty), mask=inside)


def fits(x: torch.Tensor) -> bool:
    """Whether the kernel supports `[..., n]`, n a power of two; not fp64 and not longer rows."""
    return x.is_cuda and x.dtype in _DTYPES and x.size(-1) <= LONGEST


def transform(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute `scale * x @ H` over the last dimension of `[..., n]`, in the dtype of x."""
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.size(-1)
    rows = x.numel() // n
    each = max(1, _ELEMENTS // n)
    if rows:
        _transform_kernel[(triton.cdiv(rows, each),)](
            x,
            out,
            scale,
            rows,
            N=n,
            ROWS=each,
            STAGES=n.bit_length() - 1,
            num_warps=min(32, each * n // _ELEMENTS),
        )
    return out
