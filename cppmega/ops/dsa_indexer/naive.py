"""The DSA indexer in plain torch: any device, `[b, heads, sq, sk]` at once, fp64 for fp64 inputs.

The reference for the kernels: everything is computed in fp32 (fp64) from the unrounded inputs.
Gradients come from autograd, except for the loss whose gradient is not that of its value (see
`kl_rows`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cppmega.ops.common.numerics import wide

EPSILON = 1e-10
"""Megatron's `INDEXER_LOSS_EPS`, which keeps arguments of logs and sums of targets above 0."""


def valid_keys(
    sq: int, sk: int, batch: int, starts: Tensor | None, ends: Tensor | None, device: torch.device
) -> Tensor:
    """Which keys a query may see, `[b, sq, sk]`: start <= key < end, causal without bounds."""
    key = torch.arange(sk, device=device)
    if starts is None or ends is None:
        starts = torch.zeros(sq, dtype=torch.int64, device=device)
        ends = torch.arange(1 + sk - sq, 1 + sk, device=device)
    seen = (key >= starts.unsqueeze(-1)) & (key < ends.unsqueeze(-1))
    return seen.expand(batch, sq, sk)


def scores(q: Tensor, k: Tensor, weights: Tensor, valid: Tensor, use_relu: bool) -> Tensor:
    """Index scores `[b, sq, sk]`, -inf where a key is not valid."""
    s = torch.einsum("sbhd,tbd->bsht", wide(q), wide(k))
    s = s.relu() if use_relu else s
    total = torch.einsum("bsht,sbh->bst", s, wide(weights))
    return total.masked_fill(~valid, -torch.inf)


def choose(scores: Tensor, topk: int) -> Tensor:
    """The top-k keys of each row, ascending, -1 after the last; ties go to the lowest key."""
    scores = torch.where(scores == 0, 0.0, scores)  # -0.0 and 0.0 compare equal
    ordered, key = scores.sort(dim=-1, descending=True, stable=True)
    none = scores.size(-1)
    key = key[..., :topk].masked_fill(ordered[..., :topk] == -torch.inf, none)
    key = key.sort(dim=-1).values
    return key.masked_fill(key == none, -1).int()


def chosen_keys(indices: Tensor, valid: Tensor) -> Tensor:
    """Which keys are among the chosen ones, `[b, sq, sk]`."""
    mask = valid.new_zeros(*valid.shape[:-1], valid.size(-1) + 1)
    at = indices.long().masked_fill(indices < 0, valid.size(-1))
    return mask.scatter(-1, at, True)[..., :-1] & valid


def target(query: Tensor, key: Tensor, support: Tensor, softmax_scale: float) -> Tensor:
    """Attention probabilities over `support`, summed over this rank's heads, `[b, sq, sk]`."""
    key = key.expand(-1, -1, query.size(2), -1)
    s = torch.einsum("sbhd,tbhd->bhst", wide(query), wide(key)) * softmax_scale
    s = s.masked_fill(~support.unsqueeze(1), -torch.inf)
    return s.softmax(-1).nan_to_num(0.0).sum(1)


def normalized(target: Tensor) -> Tensor:
    """Normalize a target so that rows sum to one, or to zero without a valid key."""
    return target / target.sum(-1, keepdim=True).clamp_min(EPSILON)


def kl_rows(target: Tensor, scores: Tensor, support: Tensor, inside_logs: bool) -> Tensor:
    """KL divergence of each row, `[b, sq]`; its gradient with respect to the scores is p - t.

    Args:
        target: normalized, zero outside `support`.
        scores: finite where `support` is true.
        support: the keys over which both distributions are defined.
        inside_logs: the definition up to 0.18, which adds epsilon inside both logs. Its own
            gradient vanishes where p is below epsilon; here it is that of 0.19, p - t, for both.
    """
    filled = torch.where(support, scores, -torch.inf)
    empty = ~support.any(-1, keepdim=True)
    logs = filled.masked_fill(empty, 0.0).log_softmax(-1).masked_fill(~support, 0.0)
    kept = (target * (target.clamp_min(EPSILON).log() - logs)).masked_fill(~support, 0.0).sum(-1)
    if not inside_logs:
        return kept
    p = logs.exp().masked_fill(~support, 0.0)
    value = (target * ((target + EPSILON).log() - (p + EPSILON).log())).sum(-1)
    return kept + (value - kept).detach()
