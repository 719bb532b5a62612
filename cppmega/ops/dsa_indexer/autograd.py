"""Autograd of the indexer's loss on CUDA: gradients in the forward, scaled in the backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.bounds import Bounds
from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.common.scaled_triton import scaled
from cppmega.ops.dsa_indexer import per_head_triton as per_head
from cppmega.ops.dsa_indexer import sparse_triton as sparse
from cppmega.ops.dsa_indexer import topk_triton as scoring
from cppmega.ops.dsa_indexer.dense_triton import DenseTarget
from cppmega.ops.dsa_indexer.problem import Loss
from cppmega.ops.dsa_indexer.tiles_triton import IndexTiles

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Call:
    """The arguments of an `indexer_loss` call, except the tensors of queries, keys and weights."""

    topk: int
    loss: Loss
    bounds: Bounds
    rows: Tensor | None
    use_relu: bool

    def repeatable(self) -> bool:
        """Whether dk is summed in a fixed order."""
        asked = self.loss.repeatable
        return torch.are_deterministic_algorithms_enabled() if asked is None else asked

    def index(self, q: Tensor, k: Tensor, weights: Tensor) -> IndexTiles:
        """The indexer's tensors."""
        starts, ends = self.bounds
        return IndexTiles(q, k, weights, starts=starts, ends=ends, use_relu=self.use_relu)

    def choose(
        self, q: Tensor, k: Tensor, weights: Tensor, *, want_scores: bool, want_lse: bool
    ) -> tuple[Any, ...]:
        """The indices, and what else is requested of the scores."""
        starts, ends = self.bounds
        return scoring.choose(
            q,
            k,
            weights,
            self.topk,
            starts=starts,
            ends=ends,
            use_relu=self.use_relu,
            want_scores=want_scores,
            want_lse=want_lse,
        )

    def sparse_target(
        self, index: IndexTiles, query: Tensor, key: Tensor, indices: Tensor
    ) -> Tensor:
        """The target of the chosen keys, summed over all ranks."""
        scale = self.loss.softmax_scale
        if key.size(2) == 1:
            return self.loss.add_up(sparse.target(query, key, indices, scale))
        return self.loss.add_up(per_head.target(index, query, key, indices, scale))


def _sparse(
    tensors: tuple[Tensor, ...], call: Call, want_gradients: bool
) -> tuple[Tensor, Tensor, Gradients | None]:
    q, k, weights, query, key = tensors
    indices, scores, _ = call.choose(q, k, weights, want_scores=True, want_lse=False)
    index = call.index(q, k, weights)
    target = call.sparse_target(index, query, key, indices)
    problem = sparse.Sparse(index, indices, scores, target, call.rows, call.loss.inside_logs)
    factor = call.loss.factor(call.rows, scores[..., 0])
    if not want_gradients:
        return problem.losses().sum() * factor, indices, None
    losses, *gradients = problem.gradients(factor, repeatable=call.repeatable())
    dq, dk, dw = gradients
    return losses.sum() * factor, indices, (dq, dk, dw)


def _dense(
    tensors: tuple[Tensor, ...], call: Call, want_gradients: bool
) -> tuple[Tensor, Tensor, Gradients | None]:
    q, k, weights, query, key = tensors
    indices, _, lse = call.choose(q, k, weights, want_scores=False, want_lse=True)
    index = call.index(q, k, weights)
    factor = call.loss.factor(call.rows, lse)
    problem = DenseTarget(
        index,
        query,
        key,
        lse,
        rows=call.rows,
        softmax_scale=call.loss.softmax_scale,
        inside_logs=call.loss.inside_logs,
        ranks=call.loss.ranks(),
    )
    dq, dk, dw = index.empty_gradients() if want_gradients else (lse, lse, lse)
    several = call.loss.ranks() > 1
    for part in index.parts(4 if several else 2):
        target = call.loss.add_up(problem.target(part)) if several else None
        g = problem.gradient(part, target)
        if want_gradients:
            index.gradients_of_queries(part, g, factor, dq, dw)
            index.gradient_of_keys(part, g, factor, dk)
        del g, target  # or they would still be allocated for the next part
    loss = problem.losses.sum() * factor
    return loss, indices, (dq, dk.sum(0), dw) if want_gradients else None


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        query: Tensor,
        key: Tensor,
        call: Call,
        want_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        compute = _sparse if call.loss.sparse else _dense
        tensors = (q, k, weights, query, key)
        loss, indices, gradients = compute(tensors, call, want_gradients)
        if gradients is not None:
            ctx.save_for_backward(*gradients)
            ctx.dtypes = (q.dtype, k.dtype, weights.dtype)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        return loss, indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, _: None) -> tuple[Any, ...]:
        if upstream is None:
            return (None,) * 7
        upstream = upstream.float()
        dq, dk, dw = (
            scaled(gradient, upstream, dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (dq, dk.transpose(0, 1), dw, None, None, None, None)


def indexer_loss_on_cuda(
    q: Tensor, k: Tensor, weights: Tensor, query: Tensor, key: Tensor, call: Call
) -> tuple[Tensor, Tensor]:
    """Return loss and indices; the arguments are those of `dsa_indexer.indexer_loss`."""
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, weights))
    out: tuple[Tensor, Tensor] = _IndexerLoss.apply(
        q, k, weights, query.detach(), key.detach(), call, wanted
    )
    return out
