"""The lookup of rows against indexing in fp64."""

from __future__ import annotations

import torch

from cppmega.ops import ngram_hash

COUNT = 50


def rows_read(size: int) -> torch.Tensor:
    """Rows that no token reads, that one reads and that many read, among zeros."""
    drawn = torch.randint(1, COUNT - 15, (size,), generator=torch.Generator().manual_seed(1))
    drawn[::3] = 7
    drawn[1::5] = 0
    once = torch.arange(COUNT - 14, COUNT - 5)[:size]
    drawn[: len(once)] = once
    return drawn


def check(dtype: torch.dtype, dim: int, size: int, device: str = "cpu") -> None:
    """What is read is exact, sums of gradients are rounded once, and both repeat."""
    generator = torch.Generator().manual_seed(2)
    tables = torch.randn(COUNT, dim, generator=generator).to(device, dtype).requires_grad_()
    rows = rows_read(size).to(device).unsqueeze(-1)
    upstream = torch.randn(size, 1, dim, generator=generator).add_(0.25).to(device, dtype)
    found = ngram_hash.lookup(tables, rows)
    (gradient,) = torch.autograd.grad(found, tables, upstream)
    wide = torch.cat((tables.new_zeros(1, dim), tables.detach())).double()
    assert torch.equal(found.double(), wide[rows])
    exact = torch.zeros_like(wide).index_add_(0, rows.flatten(), upstream.flatten(0, 1).double())
    torch.testing.assert_close(
        gradient.double(), exact[1:], rtol=torch.finfo(dtype).eps, atol=size * 1e-7
    )
    assert not gradient[COUNT - 5 :].any()
    again = torch.autograd.grad(ngram_hash.lookup(tables, rows), tables, upstream)[0]
    assert torch.equal(gradient, again)
