"""The gradients of an embedding's rows against sums in fp64."""

from __future__ import annotations

from typing import Any

import torch

from cppmega.ops.common.main_grad import MainGrad
from cppmega.ops.pointwise import embedding

COUNT = 40
"""Rows of the table."""


def ids_of(b: int, s: int) -> torch.Tensor:
    """Ids that no token has, that one has and that many have."""
    drawn = torch.randint(0, COUNT - 9, (b, s), generator=torch.Generator().manual_seed(1))
    drawn[:, ::3] = 7
    return drawn


def weight_of(
    dtype: torch.dtype, of_total: torch.dtype, dim: int, device: str
) -> torch.nn.Parameter:
    """A parameter with a sum of earlier gradients, as Megatron's DDP makes it."""
    drawn = torch.Generator().manual_seed(2)
    table, total = (torch.randn(COUNT, dim, generator=drawn) for _ in range(2))
    weight: Any = torch.nn.Parameter(table.to(device, dtype))
    weight.main_grad = total.to(device, of_total)
    weight.grad_added_to_main_grad = False
    return weight  # type: ignore[no-any-return]


def upstream_of(b: int, s: int, dim: int, layout: str) -> torch.Tensor:
    """A gradient `[b, s, dim]`: contiguous, transposed, or expanded from one column."""
    drawn = torch.Generator().manual_seed(3)
    if layout == "transposed":
        return torch.randn(s, b, dim, generator=drawn).transpose(0, 1)
    if layout == "expanded":
        return torch.randn(b, s, 1, generator=drawn).expand(b, s, dim)
    return torch.randn(b, s, dim, generator=drawn)


def check(
    dtype: torch.dtype,
    of_total: torch.dtype,
    dim: int,
    ids: torch.Tensor,
    layout: str = "plain",
    masked: torch.Tensor | None = None,
    device: str = "cpu",
) -> None:
    """Rows are read exactly, sums are rounded once and repeat, and other rows do not change."""
    upstream = upstream_of(*ids.shape, dim, layout).to(dtype)
    found = []
    for _ in range(2):
        weight: Any = weight_of(dtype, of_total, dim, device)
        before = weight.main_grad.clone()
        given = None if masked is None else masked.to(device)
        main = MainGrad.of(weight)
        assert main is not None and embedding.obstacle(main) is None
        out = embedding.lookup(main, ids.to(device), given)
        assert torch.equal(out, weight.detach()[ids.to(device)])
        out.backward(upstream.to(device))  # type: ignore[no-untyped-call]
        assert weight.grad_added_to_main_grad and weight.grad is not None
        found.append(weight.main_grad.cpu())
    assert torch.equal(*found)
    kept = torch.ones_like(ids, dtype=torch.bool) if masked is None else ~masked
    exact = before.double().cpu()
    exact.index_add_(0, ids[kept], upstream[kept].double())
    eps = torch.finfo(of_total).eps
    torch.testing.assert_close(found[0].double(), exact, rtol=eps, atol=ids.numel() * 1e-6)
    others = torch.ones(COUNT, dtype=torch.bool)
    others[ids[kept]] = False
    assert torch.equal(found[0][others], before.cpu()[others])
