"""DSA's sparse attention in plain torch: any device, over the gathered keys, fp64 for fp64 inputs.

The reference for the kernels: everything is computed in fp32 (fp64) from the unrounded inputs, and
autograd differentiates it. The gathered keys of all queries are in memory at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cppmega.ops.common.numerics import wide


def visible(indices: Tensor, sk: int, starts: Tensor | None, ends: Tensor | None) -> Tensor:
    """Which entries `[b, sq, topk]` are keys that their query may see.

    Args:
        indices: `[b, sq, topk]`; an entry outside `0 <= key < sk` is not a key.
        sk: the number of keys.
        starts: first key of a row, `[sq]` or `[b, sq]`; None for both is causal.
        ends: the key after the last one of a row.
    """
    sq = indices.size(1)
    if starts is None or ends is None:
        starts = torch.zeros(sq, dtype=torch.int64, device=indices.device)
        ends = torch.arange(1 + sk - sq, 1 + sk, device=indices.device)
    inside = (indices >= 0) & (indices < sk)
    return inside & (indices >= starts.unsqueeze(-1)) & (indices < ends.unsqueeze(-1))


def attention(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, seen: Tensor, softmax_scale: float
) -> Tensor:
    """The attention of each query to its keys, `[sq, b, heads, v]`, 0 where it sees none.

    Args:
        query: `[sq, b, heads, d]`.
        key: `[sk, b, heads or 1, d]`.
        value: `[sk, b, heads or 1, v]`.
        indices: `[b, sq, topk]`.
        seen: which of them count, of the same shape; see `visible`.
        softmax_scale: factor on the products.
    """
    at = torch.where(seen, indices, 0).long()
    batch = torch.arange(at.size(0), device=at.device)[:, None, None]
    keys, values = (wide(x)[at, batch] for x in (key, value))  # a single head serves all
    scores = torch.einsum("sbhd,bsthd->bsht", wide(query), keys) * softmax_scale
    scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
    empty = ~seen.any(-1)[:, :, None, None]
    p = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(~seen.unsqueeze(2), 0.0)
    return torch.einsum("bsht,bsthv->sbhv", p, values).to(query.dtype)
