"""The gradients of a router's scores against fp64."""

from __future__ import annotations

import torch

from cppmega.ops.pointwise import router_gating
from cppmega.ops.pointwise import router_gating_naive as router_gating_reference


def check(
    dtype: torch.dtype, of_weight: torch.dtype, tokens: int, hidden: int, experts: int, device: str
) -> None:
    """As far from exact as plain fp32, rounded once, and the same bits twice."""
    drawn = torch.Generator().manual_seed(tokens)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=drawn)

    inp = normal(tokens, hidden).to(device, dtype)
    weight = (0.02 * normal(experts, hidden)).to(device, of_weight)
    given = (normal(tokens, experts) + 0.25).to(device)
    given[::7] = 0  # tokens whose scores nothing depends on
    found = router_gating.gradients(inp, weight, given)
    exact = router_gating_reference.gradients(inp.double(), weight.double(), given.double())
    plain = router_gating_reference.gradients(inp, weight, given)
    for mine, wanted, other in zip(found, exact, plain, strict=True):
        error, allowed = ((each.double() - wanted).norm() for each in (mine, other))
        assert mine.dtype == other.dtype
        assert error <= 1.5 * allowed + 1e-6 * wanted.norm(), (dtype, float(error), float(allowed))
    again = router_gating.gradients(inp, weight, given)
    assert all(torch.equal(mine, other) for mine, other in zip(found, again, strict=True))
