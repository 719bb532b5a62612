"""Walsh-Hadamard transform in one CUDA kernel that reads and writes each element once.

Grid: blocks of rows. A program holds about 1,024 elements, or one longer row, in registers and runs
all log2(n) stages on them in fp32. The sums are those of `cppmega.ops.pointwise.hadamard` in the
same order, so that the results are bitwise equal.

Memory bandwidth limits it: large inputs take 1.03 to 1.07 times as long as a copy on an H200, small
ones the time of a launch (`benchmarks/results/hadamard_h200.md`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cppmega.ops.common.launch import on_its_device

LONGEST = 1 << 15
"""Longest row, in elements, that one program holds."""

_ELEMENTS = 1024
"""Elements per program, for shorter rows."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def butterflies(x, ROWS: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr):
    """`x @ H` for a tile `[ROWS, N]` in registers, N = 2**STAGES."""
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, (ROWS, N >> (stage + 1), 2, 1 << stage))
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        sums = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
        x = tl.reshape(sums, (ROWS, N))
    return x


@on_its_device
@triton.jit
def _transform_kernel(
    source, out, scale, rows, N: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs = row[:, None] * N + tl.arange(0, N)[None, :]
    mask = row[:, None] < rows
    x = tl.load(source + offs, mask=mask, other=0.0).to(tl.float32)
    x = butterflies(x, ROWS, N, STAGES)
    tl.store(out + offs, (x * scale).to(out.dtype.element_ty), mask=mask)


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
