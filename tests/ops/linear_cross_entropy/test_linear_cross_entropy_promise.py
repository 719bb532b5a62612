"""What linear cross-entropy is promised of its upstream gradient and targets, and its errors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from cppmega.ops.linear_cross_entropy.autograd import deferred_scalar  # noqa: E402
from tests.ops.linear_cross_entropy.cases import (  # noqa: E402
    dense,
    error,
    make_case,
    promised,
    run,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("row", [0, 2])
def test_a_broken_promise_is_an_error(row: int) -> None:
    # Row 0 has weight 0, row 2 has not; neither may get another gradient.
    case = make_case()
    loss = promised(case, caller="linear_ce_some_patch")
    gradient = (case.scalar * case.weights).double()
    gradient[row] += 1e-3
    with pytest.raises(RuntimeError, match=r"linear_ce_some_patch: .*arbitrary"):
        loss.backward(gradient)


def test_ignored_rows_are_outside_the_promise() -> None:
    case = make_case()
    loss = promised(case)
    gradient = (case.scalar * case.weights).double()
    gradient[case.targets == -100] = 123.0
    loss.backward(gradient)
    assert error(case.weight.grad, dense(case, case.scalar * case.weights).weight_grad) < 1e-12


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("masked", [False, True])
def test_non_finite_upstream_reaches_the_loss_scaler(bad: float, masked: bool) -> None:
    weights = torch.zeros(4) if masked else torch.ones(4)
    scalar = deferred_scalar(torch.full((4,), bad), weights, "test")
    assert not scalar.isfinite()


def test_scalar_of_a_mask_is_exact() -> None:
    mask = (torch.arange(1000) % 3 > 0).float()
    scalar = torch.tensor(0.1) / 7
    assert deferred_scalar(scalar * mask, mask, "test").float() == scalar


def test_messages_fit_in_a_device_assertion() -> None:
    # CUDA cuts them at 256 bytes.
    with pytest.raises(RuntimeError) as caught:
        deferred_scalar(torch.tensor([1.0, 2.0]), torch.ones(2), "linear_ce_hybrid_head")
    assert str(caught.value).endswith("CPPMEGA_LINEAR_CE_UPSTREAM=arbitrary.")
    assert len(str(caught.value)) < 256


def test_targets_outside_the_vocabulary() -> None:
    case = make_case(padding=4)
    case.targets[2] = case.vocab_size
    with pytest.raises(RuntimeError, match="a target is outside"):
        run(case, "arbitrary")
    weights = case.weights.clone()
    weights[2] = 0
    run(case._replace(weights=weights), "weighted-scalar")
