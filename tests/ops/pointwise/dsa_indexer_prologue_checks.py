"""Checks of the prologue's kernel, for the interpreter and for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cppmega.ops.pointwise.dsa_indexer_prologue import Inputs, Rotary
from cppmega.ops.pointwise.dsa_indexer_prologue import _Prepare as Prepare
from cppmega.ops.pointwise.dsa_indexer_prologue_naive import rotated, wide


def angles(count: int, width: int, *, adjacent: bool = False) -> Tensor:
    """As `RotaryEmbedding` makes them."""
    each = torch.outer(torch.arange(count).float(), 1e4 ** -torch.linspace(0, 1, width // 2))
    both = torch.stack((each, each), -1).flatten(1) if adjacent else torch.cat((each, each), 1)
    return both[:, None, None]


def tensors(s: int, b: int, heads: int, d: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
    made = torch.Generator().manual_seed(seed)
    shapes = ((s, b, heads, d), (s, b, d), (s, b, heads))
    q, k, w = (torch.randn(*shape, generator=made).to(dtype) for shape in shapes)
    return q, k, w


def plain(inputs: Inputs, rotary: Rotary, hadamard: bool, scale: float) -> Inputs:
    """The reference, in the type of the inputs."""
    q, k, w = inputs
    many, one = rotary.documents or (None, None)
    return (
        rotated(q, rotary, many, hadamard),
        rotated(k, rotary, one, hadamard),
        (wide(w) * scale).to(w.dtype),
    )


def _both_ways(call: Any, inputs: Inputs, upstream: Inputs) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(*leaves)
    return [x.detach() for x in (*out, *torch.autograd.grad(out, leaves, upstream))]


def check_prologue(
    s: int,
    b: int,
    heads: int,
    d: int,
    rotary: Rotary,
    dtype: torch.dtype,
    *,
    hadamard: bool = True,
    device: str = "cpu",
) -> None:
    """Results and gradients, strided inputs and upstream gradients, against fp64."""
    scale = 0.37 * (heads * d) ** -0.5
    inputs, upstream = (
        tuple(x.to(device) for x in tensors(s, b, heads, d, dtype, seed)) for seed in (0, 1)
    )
    # As the loss gives them: dk comes transposed, and q may be a part of a wider projection.
    dq, dk, dw = upstream
    upstream = dq, dk.transpose(0, 1).contiguous().transpose(0, 1), dw
    q, k, w = inputs
    inputs = torch.cat((q, q), -1)[..., :d], k, torch.cat((w, w), -1)[..., heads:]
    found = _both_ways(lambda *x: Prepare.apply(*x, rotary, hadamard, scale), inputs, upstream)

    def reference(kind: torch.dtype) -> list[Tensor]:
        wider = [tuple(x.to(kind) for x in each) for each in (inputs, upstream)]
        return _both_ways(lambda *x: plain(x, rotary, hadamard, scale), *wider)

    true, low = reference(torch.float64), reference(torch.float32)
    for mine, floor, exact in zip(found, low, true, strict=True):
        assert mine.dtype == dtype and mine.is_contiguous() and torch.isfinite(mine).all()
        norm = exact.norm().clamp_min(1e-30)
        error = (mine.double() - exact).norm() / norm
        assert error <= 1.5 * (floor.to(dtype).double() - exact).norm() / norm + 2e-7
        torch.testing.assert_close(
            mine.double(),
            exact,
            rtol=2 * torch.finfo(dtype).eps,
            atol=4e-6 * float(exact.abs().max()),
        )
