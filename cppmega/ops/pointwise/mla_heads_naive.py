"""MLA's queries, keys and values of each head from their projections, in torch.

Each head's query and key end with columns that know their position, and all heads share those of
the key (DeepSeek-AI, "DeepSeek-V2", 2024, equations 37 to 46).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cppmega.ops.pointwise import rope_naive


def query_key_value(
    q: Tensor, kv: Tensor, turned: Tensor, angles: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of the core attention, with gradients by autograd.

    Args:
        q: `[s, b, heads, d + r]`, of which the last r columns are rotated.
        kv: `[s, b, heads, d + v]`: the first columns of keys, and the values.
        turned: `[s, b, 1, r]`, the last columns of all heads' keys, which are rotated already.
        angles: `[s, 1, 1, w]`, one per column of the first w <= r that are rotated.
        scale: factor of cos and sin.

    Returns:
        The query `[s, b, heads, d + r]`, the key `[s, b, heads, d + r]` and the value
        `[s, b, heads, v]`, contiguous.
    """
    plain = q.size(-1) - turned.size(-1)
    query = rope_naive.rotated(q, angles, gathered=True, scale=scale, start=plain)
    first, value = kv.split((plain, kv.size(-1) - plain), -1)
    key = torch.cat((first, turned.expand(-1, -1, kv.size(2), -1)), -1)
    return query, key, value.contiguous()
