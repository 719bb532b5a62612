"""Linear cross-entropy in plain torch, one chunk at a time, on any device.

Everything is computed in fp32 (fp64 for fp64 inputs) from the unrounded inputs, so it is also the
reference for the other backends, whose errors come from rounding the logits. See
`chunks.ChunkKernels` for the contract of each function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cppmega.ops.linear_cross_entropy.chunks import RowStatistics, Softmax, softmax_of


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64 inputs (which `torch.autograd.gradcheck` needs)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """The accumulation type: dX is not rounded before the deferred scalar is applied."""
    return accumulation_dtype(dtype)


def logits_buffer(rows: int, columns: int, like: Tensor) -> Tensor:
    """`[rows, columns]` in the accumulation type."""
    return like.new_empty(rows, columns, dtype=accumulation_dtype(like.dtype))


def logits(hidden: Tensor, weight: Tensor, scale: float, out: Tensor) -> None:
    """out = scale * hidden @ weight.T"""
    torch.mm(hidden.to(out.dtype), weight.to(out.dtype).t(), out=out).mul_(scale)


def statistics(logits: Tensor, targets: Tensor, columns: int, want_argmax: bool) -> RowStatistics:
    """Statistics of `logits[:, :columns]`."""
    if columns == 0:
        empty = logits.new_full(targets.shape, -torch.inf)
        argmax = torch.zeros_like(targets) if want_argmax else None
        return RowStatistics(empty, torch.zeros_like(empty), empty, argmax)
    valid = logits[:, :columns]
    maximum, argmax = valid.max(dim=1)
    column = targets.clamp(min=0).unsqueeze(1)
    elsewhere = (targets < 0).unsqueeze(1)
    at_target = valid.gather(1, column).masked_fill(elsewhere, -torch.inf)
    powers = (valid - maximum.unsqueeze(1)).exp_()
    # Excluded before the sum: in 1 + others, a confident row's gradient would be rounded away.
    powers.scatter_(1, column, powers.gather(1, column) * elsewhere)
    return RowStatistics(
        maximum, powers.sum(1), at_target.squeeze(1), argmax if want_argmax else None
    )


def gradient_(
    logits: Tensor, targets: Tensor, columns: int, softmax: Softmax, row_weights: Tensor
) -> None:
    """Overwrite logits by `row_weights * (softmax - onehot)`; 0 from `columns` on."""
    logits.sub_(softmax.maximum.unsqueeze(1)).exp_()
    logits[:, columns:] = 0
    column = targets.clamp(min=0).unsqueeze(1)
    here = (targets >= 0).unsqueeze(1)
    at_target = torch.where(here, -softmax.others.unsqueeze(1), logits.gather(1, column))
    logits.scatter_(1, column, at_target)
    logits.mul_((row_weights / softmax.total).unsqueeze(1))


def statistics_and_gradient_(
    logits: Tensor, targets: Tensor, columns: int, row_weights: Tensor, want_argmax: bool
) -> RowStatistics:
    """Statistics and gradient, for a rank that has the complete vocabulary."""
    found = statistics(logits, targets, columns, want_argmax)
    gradient_(logits, targets, columns, softmax_of(found), row_weights)
    return found


def hidden_gradient(dlogits: Tensor, weight: Tensor, scale: float, out: Tensor) -> None:
    """out = scale * dlogits @ weight"""
    torch.mm(dlogits, weight.to(dlogits.dtype), out=out).mul_(scale)


def weight_gradient(
    dlogits: Tensor, hidden: Tensor, scale: float, accumulate: bool, out: Tensor
) -> None:
    """out = scale * dlogits.T @ hidden, added to the contents of `out` if `accumulate`."""
    beta = 1 if accumulate else 0
    torch.addmm(out, dlogits.t(), hidden.to(dlogits.dtype), beta=beta, alpha=scale, out=out)


def scaled(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """factor * source, rounded once to `dtype`."""
    return (source * factor).to(dtype)
