"""Linear cross-entropy on CUDA: cuBLAS for the three GEMMs, and one Triton kernel for the rows.

Row kernel. Grid: rows of logits. A program reads its row once for the online softmax (maximum, sum
without the target, target logit, arg-max), and once more in reverse, mostly from L2, to overwrite
it in place with the gradient. It holds a running maximum `m_i` and sum `l_i` per vector of 8
columns in registers. Memory bandwidth limits it: 0.70 ms for 4096 rows of 131072 columns, where one
read and one write would take 0.51. The GEMMs, 94 to 96 % of a step, are limited by tensor cores
under the power limit (`benchmarks/results/linear_cross_entropy_designs.md`).

Logits and their gradients have the type of the inputs (bf16 or fp16, as in the unfused path), all
arithmetic on them is fp32, and dW accumulates in fp32 inside the GEMM. Nothing waits for the
device, allocates memory that depends on a device value, or uses atomics: the result is bitwise
reproducible, and everything can be captured in a CUDA graph. See `chunks.ChunkKernels` for the
contract of each function.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.scaled_triton import scaled as scaled
from cppmega.ops.linear_cross_entropy.chunks import RowStatistics, Softmax

VECTOR: tl.constexpr = tl.constexpr(8)
"""Columns that one thread reads at a time: 16 bytes of bf16."""

_LOWEST: tl.constexpr = tl.constexpr(-3.0e38)
"""Used instead of -inf where two such values may be subtracted."""

_ALIGNMENT = 64
"""Rows of logits are aligned to 128 bytes for any V: complete vectors, and TMA for cuBLAS."""

ROW_GROUPS = 2048
"""Vectors of a row that the row kernel reads per step."""

ROW_WARPS = 32
"""Warps per row. One or two programs fill an SM, and the rows in flight fit in L2."""


@on_its_device
@triton.jit
def _row_kernel(
    logits,
    targets,
    row_weights,
    maximum,
    others,
    target_logit,
    total,
    argmax,
    STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATISTICS: tl.constexpr,
    GRADIENT: tl.constexpr,
    ARGMAX: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Process one row.

    It is read up to `STRIDE`, so that every vector is complete; columns beyond `COLUMNS` count as
    -inf, whatever their contents, and become 0.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * STRIDE
    lane = tl.arange(0, GROUPS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    target = tl.load(targets + row).to(tl.int32)

    if STATISTICS:
        # Each thread keeps a running maximum and sum per vector, so the loop needs no exchange.
        m_i = tl.full([GROUPS], _LOWEST, tl.float32)
        l_i = tl.zeros([GROUPS], tl.float32)
        best = tl.zeros([GROUPS], tl.int32)
        for start in range(0, COLUMNS, GROUPS * VECTOR):
            column = start + lane
            z = tl.load(base + column, mask=column < STRIDE, other=0.0).to(tl.float32)
            z = tl.where(column < COLUMNS, z, float("-inf"))
            m_block = tl.max(z, axis=1)
            m_new = tl.maximum(m_i, m_block)
            # The target is part of the maximum but not of the sum: a confident row's loss and
            # gradient are the sum of the others, which would be rounded away in 1 + others.
            p = tl.where(column == target, 0.0, tl.exp(z - m_new[:, None]))
            l_i = l_i * tl.exp(m_i - m_new) + tl.sum(p, axis=1)
            if ARGMAX:
                first = tl.min(tl.where(z == m_block[:, None], column, 2147483647), axis=1)
                best = tl.where(m_block > m_i, first, best)
            m_i = m_new
        m = tl.max(m_i, axis=0)
        l_others = tl.sum(l_i * tl.exp(m_i - m), axis=0)
        at_target = tl.load(base + tl.maximum(target, 0), mask=target >= 0, other=float("-inf"))
        at_target = at_target.to(tl.float32)
        l_total = l_others + tl.exp(at_target - m)
        tl.store(maximum + row, m)
        tl.store(others + row, l_others)
        tl.store(target_logit + row, at_target)
        if ARGMAX:
            winner = tl.min(tl.where(m_i == m, best, 2147483647), axis=0)
            tl.store(argmax + row, winner.to(tl.int64))
    else:
        m = tl.load(maximum + row)
        l_others = tl.load(others + row)
        l_total = tl.load(total + row)

    if GRADIENT:
        if STATISTICS:
            # Other threads overwrite the target logit that this one has just read.
            tl.debug_barrier()
        scale = tl.load(row_weights + row) / l_total
        # In reverse, because the data read last is most likely still in the cache.
        last: tl.constexpr = (STRIDE - 1) // (GROUPS * VECTOR) * (GROUPS * VECTOR)
        for back in range(0, STRIDE, GROUPS * VECTOR):
            column = last - back + lane
            mask = column < STRIDE
            z = tl.load(base + column, mask=mask, other=0.0).to(tl.float32)
            dlogits = tl.where(column == target, -l_others, tl.exp(z - m)) * scale
            dlogits = tl.where(column < COLUMNS, dlogits, 0.0)
            dlogits = dlogits.to(logits.dtype.element_ty)
            # Not read again: leave the cache to rows that will be (8 % of the kernel's time).
            tl.store(base + column, dlogits, mask=mask, eviction_policy="evict_first")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for every input."""
    return torch.float32


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of the inputs, as in the unfused path, except for fp16.

    Before the deferred scalar, which carries the loss scale, a confident token's dX lies below
    fp16's normal range.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def logits_buffer(rows: int, columns: int, like: Tensor) -> Tensor:
    """`[rows, columns]` in the type of `like`, with rows aligned for complete vectors."""
    stride = -(-columns // _ALIGNMENT) * _ALIGNMENT
    return like.new_empty(rows, stride)[:, :columns]


def logits(hidden: Tensor, weight: Tensor, scale: float, out: Tensor) -> None:
    """out = scale * hidden @ weight.T, the scale applied in fp32."""
    torch.addmm(out, hidden, weight.t(), beta=0, alpha=scale, out=out)


def _rows(
    logits: Tensor,
    targets: Tensor,
    columns: int,
    *,
    softmax: Softmax | None,
    row_weights: Tensor | None,
    want_argmax: bool,
) -> RowStatistics:
    """Launch the row kernel, for statistics unless `softmax` is given, and for the gradient if
    weights are given."""
    rows = logits.shape[0]
    numbers = logits.new_empty(3 if softmax is None else 0, rows, dtype=torch.float32)
    maximum, others, at_target = numbers if softmax is None else (*softmax[:2], softmax.total)
    found = RowStatistics(
        maximum, others, at_target, torch.empty_like(targets) if want_argmax else None
    )
    vectors: int = triton.cdiv(logits.stride(0), VECTOR.value)
    groups = min(ROW_GROUPS, triton.next_power_of_2(vectors))
    options: dict[str, Any] = {"num_warps": min(ROW_WARPS, max(4, groups // 32))}
    _row_kernel[(rows,)](
        logits,
        targets,
        maximum if row_weights is None else row_weights,
        maximum,
        others,
        at_target,
        maximum if softmax is None else softmax.total,
        targets if found.argmax is None else found.argmax,
        STRIDE=logits.stride(0),
        COLUMNS=columns,
        STATISTICS=softmax is None,
        GRADIENT=row_weights is not None,
        ARGMAX=want_argmax,
        GROUPS=groups,
        **options,
    )
    return found


def statistics(logits: Tensor, targets: Tensor, columns: int, want_argmax: bool) -> RowStatistics:
    """Statistics of `logits[:, :columns]`."""
    return _rows(logits, targets, columns, softmax=None, row_weights=None, want_argmax=want_argmax)


def gradient_(
    logits: Tensor, targets: Tensor, columns: int, softmax: Softmax, row_weights: Tensor
) -> None:
    """Overwrite logits by `row_weights * (softmax - onehot)`; 0 from `columns` on."""
    _rows(logits, targets, columns, softmax=softmax, row_weights=row_weights, want_argmax=False)


def statistics_and_gradient_(
    logits: Tensor, targets: Tensor, columns: int, row_weights: Tensor, want_argmax: bool
) -> RowStatistics:
    """Statistics and gradient in one launch, for a rank that has the complete vocabulary."""
    return _rows(
        logits, targets, columns, softmax=None, row_weights=row_weights, want_argmax=want_argmax
    )


def hidden_gradient(dlogits: Tensor, weight: Tensor, scale: float, out: Tensor) -> None:
    """out = scale * dlogits @ weight, summed in fp32 and rounded once.

    With a bf16 output, cuBLAS may split this long sum over V and add the parts in bf16, which
    doubles the error of dX if the output has few tiles.
    """
    wide = out if out.dtype == torch.float32 else out.new_empty(out.shape, dtype=torch.float32)
    torch.addmm(wide, dlogits, weight, out_dtype=torch.float32, beta=0, alpha=scale, out=wide)
    if wide is not out:
        out.copy_(wide)


def weight_gradient(
    dlogits: Tensor, hidden: Tensor, scale: float, accumulate: bool, out: Tensor
) -> None:
    """out = scale * dlogits.T @ hidden, added in fp32 to the contents of `out` if `accumulate`."""
    beta = 1 if accumulate else 0
    torch.addmm(out, dlogits.t(), hidden, out_dtype=torch.float32, beta=beta, alpha=scale, out=out)
