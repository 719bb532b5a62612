"""Linear cross-entropy against dense fp64 autograd."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from cppmega.errors import CppmegaError  # noqa: E402
from cppmega.ops import linear_cross_entropy as op  # noqa: E402
from cppmega.ops.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from tests.ops.linear_cross_entropy.cases import (  # noqa: E402
    UPSTREAMS,
    Calls,
    assert_same,
    confident_case,
    dense,
    error,
    make_case,
    run,
    unrounded,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("chunk", [1, 5, 37, 128])
@pytest.mark.parametrize("padding", [0, 11])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_equals_dense_autograd(upstream: str, chunk: int, padding: int, scale: float) -> None:
    case = make_case(padding=padding)
    got = run(case, upstream, chunk_tokens=chunk, logit_scale=scale)
    assert_same(got, dense(case, case.scalar * case.weights, scale), 1e-12)
    assert not got.weight_grad[case.vocab_size :].any()


@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_any_shape_and_mask(upstream: str) -> None:
    hypothesis = pytest.importorskip("hypothesis")
    integers = hypothesis.strategies.integers

    @hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
    @hypothesis.given(
        integers(1, 40), integers(1, 9), integers(1, 30), integers(0, 9), integers(1, 50)
    )
    def check(tokens: int, hidden: int, vocabulary: int, padding: int, chunk: int) -> None:
        case = make_case(tokens, hidden, vocabulary, padding, std=3.0, seed=tokens)
        want = dense(case, case.scalar * case.weights)
        got = run(case, upstream, chunk_tokens=chunk)
        assert torch.equal(got.argmax, want.argmax)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-10, atol=1e-12)

    check()


def test_gradcheck_with_any_upstream_gradient() -> None:
    case = make_case(tokens=7, hidden=3, vocabulary=5)
    assert torch.autograd.gradcheck(
        lambda x, w: linear_cross_entropy(x, w, case.targets, chunk_tokens=3).loss,
        (case.hidden, case.weight),
    )


@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("std", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_loses_only_the_rounding_of_its_results(
    upstream: str, std: float, dtype: torch.dtype
) -> None:
    # The reference computes in fp32 from the inputs as they are: its loss is fp32-exact, its
    # gradients are rounded once.
    case = make_case(std=std, dtype=dtype)
    got = run(case, upstream, chunk_tokens=8)
    want = dense(case, case.scalar * case.weights)
    assert got.loss.dtype == torch.float32
    assert got.hidden_grad.dtype == got.weight_grad.dtype == dtype
    assert error(got.loss, want.loss) < 2e-6
    assert error(got.hidden_grad, want.hidden_grad) < max(torch.finfo(dtype).eps, 2e-5)
    assert error(got.weight_grad, want.weight_grad) < max(torch.finfo(dtype).eps, 2e-5)


@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("doubt", [1e-2, 1e-4, 1e-6, 1e-7])
@pytest.mark.parametrize(
    ("dtype", "level"), [(torch.float32, 20.0), (torch.float32, 80.0), (torch.bfloat16, 20.0)]
)
def test_confident_tokens_keep_their_gradient(
    upstream: str, doubt: float, dtype: torch.dtype, level: float
) -> None:
    case = confident_case(doubt, level, dtype)
    got = run(case, upstream, chunk_tokens=16)
    want = unrounded(case)
    assert error(got.loss, want.loss) < 2e-6
    for name in ("hidden_grad", "weight_grad"):
        assert error(getattr(got, name), getattr(want, name)) < max(torch.finfo(dtype).eps, 2e-6)


def test_an_infinite_logit_is_seen() -> None:
    case = make_case(tokens=4, dtype=torch.float32)
    with torch.no_grad():
        case.weight[int(case.targets[2])] = torch.inf
        case.hidden[2] = 1.0
    assert not run(case, "arbitrary").loss[2].isfinite()


@pytest.mark.parametrize("most", [0, 1, 5])
def test_only_the_tokens_that_count_are_computed(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "_ROW_TILE", 1)
    case = make_case()
    counts = (case.weights != 0) & (case.targets != -100)
    bound = int(counts.sum()) + most
    with Calls() as calls:
        got = run(case, "weighted-scalar", counted_tokens=bound, chunk_tokens=8)
    assert calls.gemms == 3 * -(-bound // 8)
    want = run(case, "weighted-scalar")
    assert error(got.hidden_grad, want.hidden_grad) < 1e-12
    assert error(got.weight_grad, want.weight_grad) < 1e-12
    assert torch.equal(got.loss[counts], want.loss[counts])
    assert torch.equal(got.argmax[counts], want.argmax[counts])
    if not most:
        assert not got.loss[~counts].any()
        assert (got.argmax[~counts] == -1).all()


def test_tokens_that_count_fill_whole_tiles() -> None:
    case = make_case(tokens=300, dtype=torch.float32)
    counts = (case.weights != 0) & (case.targets != -100)
    order = op._counted_rows(counts, int(counts.sum()), "test")
    assert order.shape == (256,)
    assert order.unique().shape == (256,)
    assert counts[order].sum() == counts.sum()


def test_too_small_a_number_of_tokens_is_an_error() -> None:
    case = make_case()
    counts = (case.weights != 0) & (case.targets != -100)
    with pytest.raises(RuntimeError, match="more tokens count than counted_tokens"):
        run(case, "weighted-scalar", counted_tokens=int(counts.sum()) - 1)
    with pytest.raises(CppmegaError, match="linear-ce-arguments"):
        run(case, "arbitrary", counted_tokens=5)


def test_no_token_counts() -> None:
    case = make_case()
    got = run(
        case._replace(weights=torch.zeros_like(case.weights)), "weighted-scalar", counted_tokens=0
    )
    assert not any(each.any() for each in (got.loss, got.hidden_grad, got.weight_grad))
    assert (got.argmax == -1).all()


@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scalar", [2.0**16 / 37, 2.0**-20])
def test_loss_scale_and_tiny_gradients(upstream: str, dtype: torch.dtype, scalar: float) -> None:
    case = make_case(dtype=dtype)._replace(scalar=scalar)
    got = run(case, upstream, chunk_tokens=16)
    want = dense(case, case.scalar * case.weights)
    # fp16 cannot hold the tiny gradients themselves any better than to its smallest subnormal.
    floor = 2.0**-24 if dtype == torch.float16 else 0.0
    for ours, theirs in zip(got[2:], want[2:], strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=4 * torch.finfo(dtype).eps, atol=floor + 1e-6 * scalar
        )


@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_two_weights_give_two_gradients(upstream: str) -> None:
    # Liger #968: every row was scaled by the first upstream gradient, and the loss looked fine.
    case = make_case(tokens=2, vocabulary=6)
    case.targets.copy_(torch.tensor([2, 4]))
    uneven = case._replace(weights=torch.tensor([1.0, 3.0]))
    got = run(uneven, upstream).weight_grad
    assert error(got, dense(uneven, uneven.scalar * uneven.weights).weight_grad) < 1e-12
    for dropped in ([1.0, 1.0], [3.0, 3.0], [2.0, 2.0]):
        without = dense(uneven, uneven.scalar * torch.tensor(dropped)).weight_grad
        assert error(got, without) > 0.1


@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_all_masked(upstream: str) -> None:
    case = make_case()
    got = run(case._replace(weights=torch.zeros_like(case.weights)), upstream)
    assert not got.hidden_grad.any()
    assert not got.weight_grad.any()
    assert got.loss.isfinite().all()


@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_all_ignored_and_empty(upstream: str) -> None:
    case = make_case()
    case.targets.fill_(-100)
    got = run(case, upstream)
    assert not got.loss.any()
    assert not got.hidden_grad.any()
    assert not got.weight_grad.any()
    none = make_case(tokens=0)
    got = run(none, upstream)
    assert got.loss.shape == (0,)
    assert not got.weight_grad.any()


def test_sequence_first_shape_and_one_deferred_scalar() -> None:
    # Megatron: loss [s, b], then sum(loss * mask) / count.
    case = make_case(tokens=24)
    case.targets.clamp_(min=0)
    x = case.hidden.detach().view(6, 4, -1).requires_grad_()
    mask = (case.weights > 0.3).float().view(6, 4)
    loss = linear_cross_entropy(
        x,
        case.weight,
        case.targets.view(6, 4),
        loss_weights=mask,
        upstream="weighted-scalar",
        vocab_size=case.vocab_size,
    ).loss
    assert loss.shape == (6, 4)
    (loss.transpose(0, 1) * mask.t()).sum().div(mask.sum()).backward()
    want = dense(case, mask.view(-1) / mask.sum())
    assert error(x.grad.view_as(case.hidden), want.hidden_grad) < 1e-7
    assert error(case.weight.grad, want.weight_grad) < 1e-7


def test_no_weights_are_all_ones() -> None:
    case = make_case()
    loss = linear_cross_entropy(
        case.hidden, case.weight, case.targets, upstream="weighted-scalar"
    ).loss
    grads = torch.autograd.grad(loss.sum(), (case.hidden, case.weight))
    want = dense(case, torch.ones_like(loss))
    assert error(grads[0], want.hidden_grad) < 1e-12
    assert error(grads[1], want.weight_grad) < 1e-12


@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_same_bits_every_time(upstream: str) -> None:
    case = make_case(dtype=torch.bfloat16)
    first, second = (run(case, upstream, chunk_tokens=5) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_argmax_takes_the_lowest_of_equals() -> None:
    x, w = torch.ones(3, 2), torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    out = linear_cross_entropy(x, w, torch.tensor([0, -100, 2]), return_argmax=True)
    assert out.argmax is not None
    assert out.argmax.tolist() == [1, -1, 1]
    assert not out.argmax.requires_grad
