"""The linear layers of a group of experts: values, gradients and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cppmega.ops.pointwise.grouped_linear import grouped_linear  # noqa: E402

SPLITS = [3, 0, 5]
K, N = 4, 6


def products(
    a: Sequence[Any],
    b: Sequence[Any],
    out: Sequence[Any],
    quantizers: Sequence[None],
    dtype: Any,
    *,
    layout: str,
    m_splits: list[int],
    grad: bool = False,
    accumulate: bool = False,
    single_output: bool = False,
) -> None:
    """What Transformer Engine's `general_grouped_gemm` computes, in column-major terms."""
    assert len(quantizers) == len(a) == len(b) == len(m_splits)
    assert grad is (layout != "TN") and single_output is (layout != "NT")
    if layout == "NT":
        found = [gradient.t() @ x for x, gradient in zip(a, b, strict=True)]
    else:
        found = [x @ (w.t() if layout == "TN" else w) for w, x in zip(a, b, strict=True)]
    for to, value in zip(out, [torch.cat(found)] if single_output else found, strict=True):
        to.copy_(to + value if accumulate else value)


def operands() -> tuple[Any, list[Any], Any]:
    generator = torch.Generator().manual_seed(3)
    made = {"generator": generator, "dtype": torch.float64}
    x = torch.randn(sum(SPLITS), K, **made).requires_grad_()
    weights = [torch.nn.Parameter(torch.randn(N, K, **made)) for _ in SPLITS]
    return x, weights, torch.randn(sum(SPLITS), N, **made)


def plain(x: Any, weights: Sequence[Any]) -> Any:
    return torch.cat([part @ w.t() for part, w in zip(x.split(SPLITS), weights, strict=True)])


def test_values_and_gradients_are_those_of_separate_layers() -> None:
    x, weights, upstream = operands()
    out = grouped_linear(x, SPLITS, weights, products)
    wanted = plain(x, weights)
    torch.testing.assert_close(out, wanted)
    found = torch.autograd.grad(out, (x, *weights), upstream.t().contiguous().t())
    for one, other in zip(found, torch.autograd.grad(wanted, (x, *weights), upstream), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("first", [True, False])
def test_fused_gradients_are_added_or_replace_what_is_there(first: bool) -> None:
    x, weights, upstream = operands()
    exact = torch.autograd.grad(plain(x, weights), weights, upstream)
    for weight in weights:
        weight.main_grad = torch.ones(N, K)
        weight.grad_added_to_main_grad = False
    out = grouped_linear(x, SPLITS, weights, products, fused=True, first=first)
    out.backward(upstream)
    for weight, wanted in zip(weights, exact, strict=True):
        assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
        torch.testing.assert_close(weight.main_grad, wanted.float() + (not first))


def test_a_weight_without_a_buffer_has_its_gradient_returned() -> None:
    x, weights, upstream = operands()
    weights[0].main_grad = torch.zeros(N, K)
    grouped_linear(x, SPLITS, weights, products, fused=True).backward(upstream)
    exact = torch.autograd.grad(plain(x, weights), weights, upstream)
    for weight, wanted in zip(weights, exact, strict=True):
        torch.testing.assert_close(weight.grad, wanted)
    assert not weights[0].main_grad.any()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_several_rounds_share_the_weights(fused: bool, first: bool) -> None:
    x, weights, upstream = operands()
    splits = [1, 0, 2, 0, 1, 4]
    parts = zip(x.split(splits), weights * 2, strict=True)
    wanted = torch.cat([part @ weight.t() for part, weight in parts])
    exact = torch.autograd.grad(wanted, (x, *weights), upstream)
    for weight in weights:
        weight.main_grad = torch.ones(N, K, dtype=torch.float64)
        weight.grad_added_to_main_grad = False
    out = grouped_linear(x, splits, weights, products, fused=fused, first=first)
    out.backward(upstream)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(x.grad, exact[0])
    for weight, own in zip(weights, exact[1:], strict=True):
        found = weight.main_grad - int(not first) if fused else weight.grad
        torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)


def test_parts_that_are_no_whole_rounds_are_refused() -> None:
    x, weights, _ = operands()
    for splits in ([8], [2, 2, 2, 2], []):
        with pytest.raises(ValueError, match="parts of 3 weights"):
            grouped_linear(x, splits, weights, products)


def test_only_what_is_asked_for_is_computed() -> None:
    x, weights, upstream = operands()
    ran: list[str] = []

    def counting(*given: Any, layout: str, **more: Any) -> None:
        ran.append(layout)
        products(*given, layout=layout, **more)

    for weight in weights:
        weight.requires_grad_(False)
    grouped_linear(x, SPLITS, weights, counting).backward(upstream)
    assert ran == ["TN", "NN"]
    for weight in weights:
        weight.requires_grad_(True)
    grouped_linear(x.detach(), SPLITS, weights, counting).backward(upstream)
    assert ran == ["TN", "NN", "TN", "NT"]
