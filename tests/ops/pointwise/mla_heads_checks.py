"""MLA's queries, keys and values against their reference, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cppmega.ops.pointwise import mla_heads
from cppmega.ops.pointwise import mla_heads_naive as mla_heads_reference

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "batch first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "heads first": lambda x: x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
    "columns first": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "expanded": lambda x: x[:, :, :1].expand(x.shape),
}
"""Of the gradients that the core attention returns."""


def results(
    function: Callable[..., Any], tensors: tuple[Tensor, ...], angles: Tensor, *upstream: Tensor
) -> list[Tensor]:
    """Query, key and value, and the gradients of the projections, as one function has them."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves, angles, 0.8)
    return [*(x.detach() for x in out), *torch.autograd.grad(out, leaves, upstream)]


def check(
    dtype: torch.dtype, s: int, b: int, heads: int, d: int, r: int, v: int, width: int, device: str
) -> None:
    """Results and gradients for every layout of gradients; the first `width` of r columns turn."""
    drawn = torch.Generator().manual_seed(s + d)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=drawn).to(device, dtype)

    angles = (40 * torch.randn(s, 1, 1, width, generator=drawn)).to(device)
    tensors = normal(s, b, heads, d + r), normal(s, b, heads, d + v), normal(s, b, 1, r)
    upstream = normal(s, b, heads, d + r), normal(s, b, heads, d + r), normal(s, b, heads, v)
    wide = results(mla_heads_reference.query_key_value, *_wide(tensors, angles, upstream))
    for name, layout in LAYOUTS.items():
        given = [layout(x) for x in upstream]
        found, again = (
            results(mla_heads.query_key_value, tensors, angles, *given) for _ in range(2)
        )
        wanted = results(mla_heads_reference.query_key_value, tensors, angles, *given)
        for mine, twice, expected in zip(found, again, wanted, strict=True):
            assert mine.dtype == expected.dtype and mine.shape == expected.shape
            assert torch.equal(mine, expected) and torch.equal(mine, twice), (name, dtype)
        assert all(x.is_contiguous() for x in found[:3])
        storages = {x.untyped_storage().data_ptr() for x in found[:3] if x.numel()}
        assert len(storages) == sum(x.numel() > 0 for x in found[:3])
        if name == "contiguous":
            close = 2e-2 if dtype != torch.float32 else 1e-5
            for mine, exact in zip(found, wide, strict=True):
                torch.testing.assert_close(mine.double(), exact, rtol=close, atol=close)


def _wide(
    tensors: tuple[Tensor, ...], angles: Tensor, upstream: tuple[Tensor, ...]
) -> tuple[Any, ...]:
    return tuple(x.double() for x in tensors), angles, *(x.double() for x in upstream)
