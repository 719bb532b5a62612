"""A weighted GELU and its gradients against fp64."""

from __future__ import annotations

import torch

from cppmega.ops.pointwise import weighted_gelu_naive as weighted_gelu_reference
from cppmega.ops.pointwise.weighted_gelu import weighted_gelu


def check(dtype: torch.dtype, rows: int, width: int, device: str) -> None:
    """As far from exact as plain fp32, rounded once, and the same bits twice."""
    drawn = torch.Generator().manual_seed(rows)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=drawn)

    x = (3 * normal(rows, width)).to(device, dtype).requires_grad_()
    weights = torch.rand(rows, 1, generator=drawn).to(device)
    weights[::5] = 0  # tokens that an expert does not change
    weights.requires_grad_()
    given = (normal(rows, width) * torch.logspace(-2, 0, width) + 0.1).to(device, dtype)

    def computed() -> tuple[torch.Tensor, ...]:
        out = weighted_gelu(x, weights)
        return (out.detach(), *torch.autograd.grad(out, (x, weights), given))

    def defined(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        of_x, of_weights = weighted_gelu_reference.gradients(*tensors)
        return weighted_gelu_reference.weighted_gelu(*tensors[:2]), of_x, of_weights

    with torch.no_grad():
        exact = defined(x.double(), weights.double(), given.double())
        plain = defined(x, weights, given)
    found = computed()
    for mine, wanted, other in zip(found, exact, plain, strict=True):
        error, allowed = ((each.double() - wanted).norm() for each in (mine, other))
        assert mine.dtype == other.dtype and mine.shape == other.shape
        assert error <= 1.5 * allowed + 1e-6 * wanted.norm(), (dtype, float(error), float(allowed))
    assert all(torch.equal(mine, other) for mine, other in zip(found, computed(), strict=True))
