"""Linear cross-entropy adds the weight's gradient to `main_grad`: gradient accumulation fusion."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cppmega.errors import CppmegaError  # noqa: E402
from cppmega.ops.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from cppmega.ops.linear_cross_entropy.autograd import main_grad_of  # noqa: E402
from tests.ops.linear_cross_entropy.cases import (  # noqa: E402
    UPSTREAMS,
    dense,
    error,
    make_case,
    run,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_out", [False, True])
def test_main_grad_accumulates(
    upstream: str, dtype: torch.dtype, main_dtype: torch.dtype, zero_out: bool
) -> None:
    case = make_case(dtype=dtype)
    weight: Any = torch.nn.Parameter(case.weight.detach())
    start = torch.randn(weight.shape, dtype=main_dtype)
    weight.main_grad = start.clone()
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = zero_out
    case = case._replace(weight=weight)
    for _ in range(2):
        got = run(case, upstream, gradient_accumulation_fusion=True, chunk_tokens=10)
    want = dense(case, case.scalar * case.weights).weight_grad
    assert weight.grad_added_to_main_grad
    added = weight.main_grad.double() - start.double()
    assert error(added, 2 * want) < (1e-5 if main_dtype == torch.float32 else 2e-2)
    assert got.weight_grad.shape == weight.shape
    assert got.weight_grad.dtype == weight.dtype
    if zero_out:
        assert not got.weight_grad.any()


def test_main_grad_without_hooks_returns_no_gradient() -> None:
    case = make_case(dtype=torch.float32)
    weight: Any = torch.nn.Parameter(case.weight.detach())
    weight.main_grad = torch.zeros_like(weight)
    linear_cross_entropy(
        case.hidden, weight, case.targets, gradient_accumulation_fusion=True
    ).loss.sum().backward()
    assert weight.grad is None
    assert weight.main_grad.any()


@pytest.mark.parametrize("fsdp", [False, True])
def test_main_grad_that_cannot_be(fsdp: bool) -> None:
    weight: Any = torch.nn.Parameter(torch.zeros(2, 2))
    if fsdp:
        weight.main_grad = torch.zeros(2, 2)
        weight.__fsdp_param__ = True
    with pytest.raises(CppmegaError, match="main-grad-missing"):
        main_grad_of(weight)


def test_frozen_weight_needs_no_main_grad() -> None:
    case = make_case()
    case.weight.requires_grad_(False)
    out = linear_cross_entropy(
        case.hidden, case.weight, case.targets, gradient_accumulation_fusion=True
    )
    out.loss.sum().backward()
    assert case.hidden.grad is not None
