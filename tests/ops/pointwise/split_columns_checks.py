"""Parts of columns and their joint gradient against torch's."""

from __future__ import annotations

import itertools

import torch

from cppmega.ops.pointwise.split_columns import split_columns

WIDTHS = (520, 16, 1, 3, 8)


def check(dtype: torch.dtype, s: int, b: int, device: str = "cpu") -> None:
    """Bitwise, with gradients in the order of the projection and in the other one."""
    drawn = torch.Generator().manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=drawn).to(device, dtype)

    projected = normal(s, b, sum(WIDTHS)).requires_grad_()
    parts = split_columns(projected, WIDTHS)
    for part, expected in zip(parts, projected.split(WIDTHS, -1), strict=True):
        assert torch.equal(part, expected)
        assert part.data_ptr() == expected.data_ptr(), "a part must not be copied"
    for place, batch_first in itertools.product(range(len(WIDTHS)), (False, True)):
        upstream = [normal(s, b, width) for width in WIDTHS]
        if batch_first:
            upstream[place] = normal(b, s, WIDTHS[place]).transpose(0, 1)
        else:
            upstream[place] = normal(s, b, 2 * WIDTHS[place])[..., ::2]
        (gradient,) = torch.autograd.grad(parts, projected, upstream, retain_graph=True)
        assert torch.equal(gradient, torch.cat(upstream, -1))
    (gradient,) = torch.autograd.grad(parts[1].sum(), projected)
    expected = torch.zeros_like(projected)
    expected[..., WIDTHS[0] : sum(WIDTHS[:2])] = 1
    assert torch.equal(gradient, expected), "parts that nothing used have a gradient of zero"
