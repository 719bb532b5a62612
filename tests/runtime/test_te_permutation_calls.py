"""A custom operator's functions give what the operator gives."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cppmega.proof import operations  # noqa: E402
from cppmega.runtime.te_permutation_calls import direct  # noqa: E402


@torch.library.custom_op("cppmega_tests::scaled", mutates_args=[])
def scaled(
    x: torch.Tensor, by: torch.Tensor | None, times: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x times the values and the number, and the indices of its rows."""
    out = x * times if by is None else x * by * times
    return out, torch.arange(len(x), dtype=torch.int32)


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    x, by, ctx.times = inputs
    ctx.needs_by = by is not None and by.requires_grad
    ctx.save_for_backward(x, by)


def _backward(ctx: Any, of_out: Any, _: Any) -> Any:
    x, by = ctx.saved_tensors
    d_x = of_out * ctx.times if by is None else of_out * by * ctx.times
    return d_x, of_out * x * ctx.times if ctx.needs_by else None, None


scaled.register_autograd(_backward, setup_context=_saved)


class Subclass(torch.Tensor):
    """A tensor whose operations are its own."""


def tensor(*size: int, needs_grad: bool = True) -> Any:
    return torch.randn(*size, generator=torch.Generator().manual_seed(1), requires_grad=needs_grad)


@pytest.mark.parametrize("learned", [None, False, True])
def test_results_and_gradients(learned: bool | None) -> None:
    found = []
    for call in (direct(scaled), scaled):
        x = tensor(3, 2)
        by = None if learned is None else tensor(3, 2, needs_grad=learned)
        out, rows = call(x, by, 3)
        assert not rows.requires_grad
        leaves = [leaf for leaf in (x, by) if leaf is not None and leaf.requires_grad]
        found.append([out, rows, *torch.autograd.grad(out, leaves, torch.arange(6.0).view(3, 2))])
    assert all(mine.equal(other) for mine, other in zip(*found, strict=True))


def test_the_dispatcher_is_asked_only_where_it_has_to_know_a_tensor() -> None:
    for x, asked in ((tensor(3, 2), 0), (tensor(3, 2).as_subclass(Subclass), 1)):
        with operations.counted() as calls:
            direct(scaled)(x, None, 2)
        assert calls["scaled"] == asked


def test_an_operator_has_one_direct_call() -> None:
    assert direct(scaled) is direct(scaled)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_permutation_has_the_bits_of_the_operators(dtype: Any) -> None:
    te = pytest.importorskip("transformer_engine.pytorch.permutation")
    torch.manual_seed(3)
    routing = torch.rand(700, 8, device="cuda").argsort(1) < 2
    probs = torch.rand(700, 8, device="cuda") * routing
    x = torch.randn(700, 512, device="cuda", dtype=dtype)
    upstream = torch.randn(700, 512, device="cuda", dtype=dtype)
    sizes = routing.view(2, 350, 8).sum(1).flatten().int()
    chunks = torch.arange(16, device="cuda", dtype=torch.int32).view(2, 8).t().flatten()
    found = []
    for through in (direct, lambda operator: operator):
        own, weights = x.clone().requires_grad_(), probs.clone().requires_grad_()
        permuted, rows, of_rows = through(te.moe_permute_mask_map_forward)(
            own, routing.int(), 1400, weights, None
        )
        ordered, of_ordered, _ = through(te.moe_chunk_sort_forward)(
            permuted, sizes, chunks, of_rows
        )
        merged = through(te.moe_unpermute_mask_map_forward)(
            (ordered * of_ordered.unsqueeze(1)).to(dtype), rows, None, 700, 8, 512, None
        )
        found.append([merged, *torch.autograd.grad(merged, (own, weights), upstream)])
    assert all(mine.equal(other) for mine, other in zip(*found, strict=True))
