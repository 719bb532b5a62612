"""Rotary embedding of a part of each head, in torch, with the roundings of Megatron.

Both columns of a pair are turned by an angle (Su et al., "RoFormer", 2021, equation 34). Megatron
rounds cos, sin, each product and their sum to the type of the tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(
    t: Tensor,
    angles: Tensor,
    adjacent: bool = False,
    gathered: bool = False,
    scale: float = 1.0,
    start: int = 0,
) -> Tensor:
    """The embedding, with gradients by autograd.

    Args:
        t: `[s, b, heads, d]`.
        angles: `[s, 1, 1, r]`, one per column of the r that are rotated.
        adjacent: columns 2i and 2i + 1 are a pair, not i and i + r / 2.
        gathered: the even ones of these columns precede the odd ones before they are paired.
        scale: factor of cos and sin.
        start: the first column that is rotated.

    Returns:
        `[s, b, heads, d]` in the type of t.
    """
    width = angles.size(-1)
    before, turned, after = t.split((start, width, t.size(-1) - start - width), -1)
    if gathered:
        turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), -1)
    if adjacent:
        first, second = turned[..., 0::2], turned[..., 1::2]
        across = torch.stack((-second, first), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        across = torch.cat((-second, first), -1)
    cos, sin = ((function(angles) * scale).to(t.dtype) for function in (torch.cos, torch.sin))
    return torch.cat((before, turned * cos + across * sin, after), -1)
