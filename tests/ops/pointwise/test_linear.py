"""Linear layers against the plain product, with gradients and where Megatron gathers them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import linear  # noqa: E402

from cppmega.ops.pointwise import linear as op  # noqa: E402


@pytest.mark.parametrize(
    ("width", "dtype", "added"),
    [(1811, torch.bfloat16, 5), (1811, torch.float32, 1), (64, torch.bfloat16, 0)],
)
def test_a_row_is_a_multiple_of_16_bytes(width: int, dtype: torch.dtype, added: int) -> None:
    assert op.padding(width, dtype) == added


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("layer", "width", "added"),
    [(op.linear, 13, 0), (op.padded_linear, 13, 3), (op.padded_linear, 16, 0)],
)
def test_it_is_the_plain_product_followed_by_zeros(
    layer: Any, width: int, added: int, fused: bool
) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(3, 2, 8), torch.nn.Parameter(torch.randn(width, 8))
    upstream = torch.linspace(-1, 1, 3 * 2 * (width + added)).view(3, 2, width + added)
    plain = x.clone().requires_grad_()
    other = weight.detach().clone().requires_grad_()
    expected = linear(plain, other)
    d_x, d_weight = torch.autograd.grad(expected, (plain, other), upstream[..., :width])
    main = torch.full_like(weight, 2.0).double()
    weight.main_grad, weight.grad_added_to_main_grad = main, False
    own = x.clone().requires_grad_()
    found = layer(own, weight, fused)
    found.backward(upstream)  # the gradients of the added columns are not zero
    torch.testing.assert_close(found[..., :width], expected)
    assert found.shape[-1] == width + added and not found[..., width:].any()
    torch.testing.assert_close(own.grad, d_x)
    assert weight.grad_added_to_main_grad is fused
    if fused:
        torch.testing.assert_close(main, d_weight.double() + 2.0, atol=1e-5, rtol=1e-5)
    else:
        torch.testing.assert_close(weight.grad, d_weight)
        assert bool((main == 2.0).all())


@pytest.mark.parametrize("layer", [op.linear, op.padded_linear])
def test_half_precision_gradients_are_summed_in_the_type_of_their_sum(layer: Any) -> None:
    """A product of bf16 is added to fp32 without being rounded to bf16 first."""
    torch.manual_seed(2)
    x = torch.randn(64, 8).bfloat16()
    weight = torch.nn.Parameter(torch.randn(3, 8).bfloat16())
    weight.main_grad = torch.zeros(3, 8)
    upstream = torch.randn(64, 8).bfloat16()
    out = layer(x, weight, True)
    out.backward(upstream[:, : out.shape[1]])
    exact = upstream[:, :3].double().t() @ x.double()
    torch.testing.assert_close(weight.main_grad.double(), exact, rtol=1e-5, atol=1e-5)
