"""DSA's indexer: which keys a query attends to, and the loss that trains it.

The score of a key is the sum over the indexer's heads of `weight * relu(q . k)`; a query attends to
its top-k keys. The loss is the KL divergence of the softmax of the scores from the attention's own
probabilities, summed over heads and normalized: over all valid keys (dense) or over the chosen ones
(sparse). Megatron computes this with tensors of `[b, heads, sq, sk]`, or in loops over the batch
and over chunks of rows.

Here the batch and packed documents (row-wise bounds `starts <= key < ends`) are part of the grid,
tiles that no row sees are skipped, and there are only a few launches:

    scores and choice       1, in scratch memory of at most `SCRATCH_BYTES`; no `[b, sq, sk]`
    sparse loss             2, with dk by atomics; 4 if bitwise reproducible
      with a key per head   4 more for each part of the queries whose target is computed at a time
    dense loss              1, and 3 for each part of the queries whose G (p - t in fp16) is held
    backward                3, whatever the loss

Nothing is recomputed for autograd: the upstream gradient of a loss is one number, so the gradients
of q, k and weights are computed in the forward, where all operands are available, and multiplied by
that number in the backward. Without gradients (the first pass of activation recomputation) the
forward computes only the loss, and with a coefficient of 0 only the choice.

The choice is a function of the fp32 scores: ties are broken by the lowest key, keys are ascending,
and -1 follows the last. The gradient is p - t in both definitions of the loss, see
`Loss.inside_logs`.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cppmega.ops.common.bounds import Bounds
from cppmega.ops.common.device import gpu_obstacle
from cppmega.ops.common.numerics import wide
from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.dsa_indexer import naive as reference
from cppmega.ops.dsa_indexer.problem import Loss


class IndexerOutput(NamedTuple):
    """The result of `indexer_loss`.

    Attributes:
        loss: one number in fp32 (fp64 for fp64 inputs).
        indices: `[b, sq, min(topk, sk)]` in int32, ascending, -1 after the last.
    """

    loss: Tensor
    indices: Tensor


def obstacle(q: Tensor, k: Tensor, key: Tensor | None = None) -> str | None:
    """Why the kernels do not support a call; None if they do.

    Args:
        q: the indexer's queries `[sq, b, heads, d]`.
        k: its keys `[sk, b, d]`.
        key: unused; Megatron files that were patched by an earlier version pass it.
    """
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype:
        return f"queries are {q.dtype} and keys {k.dtype}, not both bf16 or both fp16"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if (too_small := gpu_obstacle(q.device)) is not None:
        return too_small
    if not (0 < q.size(2) <= 128 and 0 < q.size(3) <= 128):
        return f"{q.size(2)} heads of {q.size(3)}: the kernels support 1 to 128 heads of 1 to 128"
    return None


def choose_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    *,
    bounds: Bounds | None = None,
    use_relu: bool = True,
) -> Tensor:
    """Return the keys with the top-k index scores of each query; there is no gradient.

    Args:
        q: `[sq, b, heads, d]`.
        k: `[sk, b, d]`.
        weights: `[sq, b, heads]`, including all scales.
        topk: how many keys to choose, at most their number.
        bounds: which keys a query may see; causal if omitted.
        use_relu: apply ReLU to the products.

    Returns:
        `[b, sq, min(topk, sk)]` in int32, ascending, -1 after the last.
    """
    starts, ends = bounds or Bounds()
    with torch.no_grad():
        if obstacle(q, k) is None:
            from cppmega.ops.dsa_indexer import topk_triton as kernels

            return kernels.choose(
                q, k, weights, min(topk, k.size(0)), starts=starts, ends=ends, use_relu=use_relu
            )[0]
        valid = reference.valid_keys(q.size(0), k.size(0), q.size(1), starts, ends, q.device)
        scores = reference.scores(q, k, weights, valid, use_relu)
        return reference.choose(scores, min(topk, k.size(0)))


def indexer_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    topk: int,
    loss: Loss,
    *,
    bounds: Bounds | None = None,
    rows: Tensor | None = None,
    use_relu: bool = True,
) -> IndexerOutput:
    """Compute the chosen keys, and the indexer's loss with gradients of q, k and weights.

    Args:
        q: `[sq, b, heads, d]`.
        k: `[sk, b, d]`.
        weights: `[sq, b, heads]`, including all scales.
        query: the attention's, `[sq, b, attention heads of this rank, d]`; it gets no gradient.
        key: `[sk, b, attention heads or 1, d]`; it gets no gradient.
        topk: how many keys to choose.
        loss: the definition of the loss; with a coefficient of 0, or without queries or keys,
            loss and gradients are zeros.
        bounds: which keys a query may see; causal if omitted.
        rows: `[b, sq]`, which rows count; all if omitted.
        use_relu: apply ReLU to the products.
    """
    bounds = bounds or Bounds()
    topk = min(topk, k.size(0))
    empty = 0 in (*q.shape[:2], len(k)) or (loss.sparse and topk == 0)
    if loss.coefficient == 0 or empty:
        indices = choose_keys(q, k, weights, topk, bounds=bounds, use_relu=use_relu)
        return IndexerOutput(_NoLoss.apply(q, k, weights), indices)
    if obstacle(q, k) is None:
        from cppmega.ops.dsa_indexer.autograd import Call, indexer_loss_on_cuda

        call = Call(topk, loss, bounds, rows, use_relu)
        return IndexerOutput(*indexer_loss_on_cuda(q, k, weights, query, key, call))
    return _reference_loss(q, k, weights, query, key, topk, loss, bounds, rows, use_relu)


class _NoLoss(torch.autograd.Function):
    """A loss of 0 with gradients of 0, for which a bucketed gradient reduction waits."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.like = [x.new_empty(()).expand_as(x) for x in inputs]
        return torch.zeros((), dtype=wide(inputs[0][:0]).dtype, device=inputs[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in ctx.like)


def _reference_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    topk: int,
    loss: Loss,
    bounds: Bounds,
    rows: Tensor | None,
    use_relu: bool,
) -> IndexerOutput:
    valid = reference.valid_keys(q.size(0), k.size(0), q.size(1), *bounds, q.device)
    scores = reference.scores(q, k, weights, valid, use_relu)
    with torch.no_grad():
        indices = reference.choose(scores, topk)
        support = reference.chosen_keys(indices, valid) if loss.sparse else valid
        target = loss.add_up(reference.target(query, key, support, loss.softmax_scale))
    by_row: Any = reference.kl_rows(reference.normalized(target), scores, support, loss.inside_logs)
    if rows is not None:
        by_row = by_row * rows
    return IndexerOutput(by_row.sum() * loss.factor(rows, by_row.detach()), indices)
