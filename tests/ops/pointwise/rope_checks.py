"""The rotary embedding against its reference, to the bit."""

from __future__ import annotations

import itertools

import torch

from cppmega.ops.pointwise import rope
from cppmega.ops.pointwise import rope_naive as rope_reference

WAYS = ((False, False), (True, False), (False, True))
"""Adjacent, gathered."""


def check(
    dtype: torch.dtype, s: int, b: int, heads: int, d: int, width: int, device: str, start: int = 0
) -> None:
    """Results and gradients, of contiguous tensors and of parts of larger ones."""
    drawn = torch.Generator().manual_seed(s + d)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=drawn)

    angles = (40 * normal(s, 1, 1, width)).to(device)
    for (adjacent, gathered), scale in itertools.product(WAYS, (1.0, 0.8)):
        whole = normal(s, b, heads, d + 3).to(device, dtype).requires_grad_()
        upstream = normal(b, s, heads, d).to(device, dtype).transpose(0, 1)
        found = []
        for function in (rope.rotated, rope_reference.rotated):
            out = function(whole[..., 3:], angles, adjacent, gathered, scale, start)
            found.append((out.detach(), *torch.autograd.grad(out, whole, upstream)))
        for mine, expected in zip(*found, strict=True):
            assert torch.equal(mine, expected), (dtype, adjacent, gathered, scale)
        assert found[0][0].is_contiguous()
