"""Linear cross-entropy on CUDA: cuBLAS for the three GEMMs, and one Triton kernel for the rows.

The row kernel gives one program a row of logits. It reads the row once for the online softmax
(maximum, sum without the target, target logit, arg-max) and once more, mostly from the L2 cache, to
overwrite it in place with the gradient. Logits and their gradients have the type of the inputs
(bf16 or fp16, as in the unfused path), all arithmetic on them is fp32, and dW accumulates in fp32
inside the GEMM.

Nothing waits for the device, allocates memory that depends on a device value, or uses atomics: the
result is bitwise reproducible, and everything can be captured in a CUDA graph. See
`linear_cross_entropy_chunks.ChunkKernels` for the contract of each function.
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
@triton.jit  # type: ignore[untyped-decorator]
def _row_kernel(  # type: ignore[no-untyped-def]
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
    """Process one row. It is read up to `STRIDE`, so that every vector is complete; columns beyond
    `COLUMNS` count as -inf, whatever their contents, and become 0."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * STRIDE
    lane = tl.arange(0, GROUPS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    target = tl.load(targets + row).to(tl.int32)

    if STATISTICS:
        # Each thread keeps a running maximum and sum per vector, so the loop needs no exchange.
        top = tl.full([GROUPS], _LOWEST, tl.float32)
        rest = tl.zeros([GROUPS], tl.float32)
        best = tl.zeros([GROUPS], tl.int32)
        for start in range(0, COLUMNS, GROUPS * VECTOR):
            column = start + lane
            z = tl.load(base + column, mask=column < STRIDE, other=0.0).to(tl.float32)
            z = tl.where(column < COLUMNS, z, float("-inf"))
            local = tl.max(z, axis=1)
            higher = tl.maximum(top, local)
            # The target is part of the maximum but not of the sum: a confident row's loss and
            # gradient are the sum of the others, which would be rounded away in 1 + others.
            e = tl.where(column == target, 0.0, tl.exp(z - higher[:, None]))
            rest = rest * tl.exp(top - higher) + tl.sum(e, axis=1)
            if ARGMAX:
                first = tl.min(tl.where(z == local[:, None], column, 2147483647), axis=1)
                best = tl.where(local > top, first, best)
            top = higher
        row_top = tl.max(top, axis=0)
        row_rest = tl.sum(rest * tl.exp(top - row_top), axis=0)
        at_target = tl.load(base + tl.maximum(target, 0), mask=target >= 0, other=float("-inf"))
        at_target = at_target.to(tl.float32)
        row_total = row_rest + tl.exp(at_target - row_top)
        tl.store(maximum + row, row_top)
        tl.store(others + row, row_rest)
        tl.store(target_logit + row, at_target)
        if ARGMAX:
            winner = tl.min(tl.where(top == row_top, best, 2147483647), axis=0)
            tl.store(argmax + row, winner.to(tl.int64))
    else:
        row_top = tl.load(maximum + row)
        row_rest = tl.load(others + row)
        row_total = tl.load(total + row)

    if GRADIENT:
        if STATISTICS:
            # Other threads overwrite the target logit that this one has just read.
            tl.debug_barrier()
        scale = tl.load(row_weights + row) / row_total
        # In reverse, because the data read last is most likely still in the cache.
        last: tl.constexpr = (STRIDE - 1) // (GROUPS * VECTOR) * (GROUPS * VECTOR)
        for back in range(0, STRIDE, GROUPS * VECTOR):
            column = last - back + lane
            inside = column < STRIDE
            z = tl.load(base + column, mask=inside, other=0.0).to(tl.float32)
            gradient = tl.where(column == target, -row_rest, tl.exp(z - row_top)) * scale
            gradient = tl.where(column < COLUMNS, gradient, 0.0)
            gradient = gradient.to(logits.dtype.element_ty)
            # Not read again: leave the cache to rows that will be (8 % of the kernel's time).
            tl.store(base + column, gradient, mask=inside, eviction_policy="evict_first")


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
