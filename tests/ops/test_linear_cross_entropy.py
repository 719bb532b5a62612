"""Linear cross-entropy against dense fp64 autograd, and every promise its docstring makes.

Run as a script it is the row kernel under Triton's interpreter, or one that stops the device, each
of which needs a process of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from cppmega.errors import CppmegaError  # noqa: E402
from cppmega.ops import linear_cross_entropy as op  # noqa: E402
from cppmega.ops import linear_cross_entropy_external as external  # noqa: E402
from cppmega.ops.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from cppmega.ops.linear_cross_entropy_autograd import (  # noqa: E402
    deferred_scalar,
    main_grad_of,
)
from cppmega.ops.linear_cross_entropy_chunks import (  # noqa: E402
    LOGITS_BYTES,
    default_chunk_tokens,
    softmax_of,
)
from tests import forkserver  # noqa: E402
from tests.ops import in_interpreter  # noqa: E402
from tests.support import PATIENCE  # noqa: E402

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
UPSTREAMS = ("weighted-scalar", "arbitrary")


class Case(NamedTuple):
    """Inputs of one call; `weights` has zeros and is not uniform."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    weights: Tensor
    scalar: float
    vocab_size: int


class Dense(NamedTuple):
    """What fp64 autograd over all logits says."""

    loss: Tensor
    argmax: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor


def make_case(
    tokens: int = 37,
    hidden: int = 12,
    vocabulary: int = 53,
    padding: int = 0,
    std: float = 1.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Random inputs whose logits have the standard deviation `std`; a few targets are ignored."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(tokens, hidden)
    w = normal(vocabulary + padding, hidden) * std / hidden**0.5
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    targets[1::9] = -100
    # Eighths times 3/8: exact in fp32, so the promise is kept to the last bit.
    weights = torch.randint(1, 9, (tokens,), generator=generator) / 8
    weights[::4] = 0
    x, w, weights = x.to(device, dtype), w.to(device, dtype), weights.to(device, torch.float32)
    return Case(
        x.requires_grad_(), w.requires_grad_(), targets.to(device), weights, 0.375, vocabulary
    )


def dense(case: Case, upstream: Tensor, scale: float = 1.0) -> Dense:
    """The same in fp64, with all logits at once."""
    x = case.hidden.detach().double().requires_grad_()
    w = case.weight.detach().double().requires_grad_()
    logits = scale * x @ w[: case.vocab_size].t()
    loss = cross_entropy(logits, case.targets, reduction="none", ignore_index=-100)
    x_grad, w_grad = torch.autograd.grad(loss, (x, w), upstream.double())
    argmax = logits.argmax(1).masked_fill(case.targets == -100, -1)
    return Dense(loss.detach(), argmax, x_grad, w_grad)


def run(case: Case, upstream: str, **options: Any) -> Dense:
    """The op, forward and backward, with the upstream gradient `scalar * weights`."""
    options.setdefault("vocab_size", case.vocab_size)
    out = linear_cross_entropy(
        case.hidden,
        case.weight,
        case.targets,
        loss_weights=case.weights if upstream == "weighted-scalar" else None,
        upstream=upstream,
        return_argmax=True,
        **options,
    )
    gradient = (case.scalar * case.weights).to(out.loss.dtype)
    grads = torch.autograd.grad(out.loss, (case.hidden, case.weight), gradient)
    assert out.argmax is not None
    return Dense(out.loss.detach(), out.argmax, *grads)


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the 2-norm; NaN is infinitely wrong."""
    value = ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-300)).item()
    return value if value == value else float("inf")


def assert_same(got: Dense, want: Dense, tolerance: float) -> None:
    assert torch.equal(got.argmax, want.argmax)
    for name in ("loss", "hidden_grad", "weight_grad"):
        assert error(getattr(got, name), getattr(want, name)) <= tolerance, name


class Calls(TorchDispatchMode):
    """Counts the GEMMs and remembers the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.gemms = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.gemms += func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm")
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


# Values


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


def confident_case(
    doubt: float, level: float, dtype: torch.dtype, device: str = "cpu", tokens: int = 48
) -> Case:
    """Every row gives its target the probability `1 - doubt`, at logits around `level`.

    The output matrix has one 1 per row: a logit is one number of hidden, exactly.
    """
    vocabulary = 61
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    column = targets.unsqueeze(1)
    rest = logits.scatter(1, column, -torch.inf).logsumexp(1, keepdim=True)
    logits.scatter_(1, column, rest + math.log((1 - doubt) / doubt))
    logits += level - logits.amax(1, keepdim=True)
    weight = torch.eye(vocabulary, 64, dtype=torch.float64)
    hidden = torch.nn.functional.pad(logits, (0, 3))
    weights = torch.randint(1, 9, (tokens,), generator=generator) / 8
    x, w = (t.to(device, dtype).requires_grad_() for t in (hidden, weight))
    return Case(x, w, targets.to(device), weights.to(device), 0.375, vocabulary)


def unrounded(case: Case) -> Dense:
    """Loss and gradients in fp64 by the softplus of the target's lead: neither has a 1 in it."""
    x, w = case.hidden.detach().double(), case.weight.detach().double()
    logits, column = x @ w.t(), case.targets.unsqueeze(1)
    others = logits.scatter(1, column, -torch.inf)
    lag = (others.logsumexp(1) - logits.gather(1, column).squeeze(1)).unsqueeze(1)
    d_logits = others.softmax(1).scatter(1, column, -1.0) * lag.sigmoid()
    d_logits *= (case.scalar * case.weights.double()).unsqueeze(1)
    loss = torch.nn.functional.softplus(lag, threshold=100).squeeze(1)
    return Dense(loss, logits.argmax(1), d_logits @ w, d_logits.t() @ x)


def by_log_softmax(case: Case) -> Dense:
    """The unfused path's arithmetic: fp32 over materialised logits, gradients rounded once."""
    x, w = (t.detach().clone().requires_grad_() for t in (case.hidden, case.weight))
    loss = cross_entropy((x @ w.t()).float(), case.targets, reduction="none")
    grads = torch.autograd.grad(loss, (x, w), case.scalar * case.weights)
    return Dense(loss.detach(), case.targets, *grads)


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
    order = op._those_that_count(counts, int(counts.sum()), "test")
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


# The promise


@pytest.mark.parametrize("row", [0, 2])
def test_a_broken_promise_is_an_error(row: int) -> None:
    # Row 0 has weight 0, row 2 has not; neither may get another gradient.
    case = make_case()
    loss = linear_cross_entropy(
        case.hidden,
        case.weight,
        case.targets,
        loss_weights=case.weights,
        upstream="weighted-scalar",
        caller="linear_ce_some_patch",
    ).loss
    gradient = (case.scalar * case.weights).double()
    gradient[row] += 1e-3
    with pytest.raises(RuntimeError, match=r"linear_ce_some_patch: .*arbitrary"):
        loss.backward(gradient)


def test_ignored_rows_are_outside_the_promise() -> None:
    case = make_case()
    loss = linear_cross_entropy(
        case.hidden,
        case.weight,
        case.targets,
        loss_weights=case.weights,
        upstream="weighted-scalar",
    ).loss
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


# Work and memory


@pytest.mark.parametrize(
    ("upstream", "gemms"), [("weighted-scalar", 3), ("arbitrary", 4), ("no_grad", 1)]
)
def test_gemms_and_the_largest_tensor(upstream: str, gemms: int) -> None:
    case = make_case(tokens=64, hidden=4, vocabulary=91, dtype=torch.float32)
    with Calls() as calls:
        if upstream == "no_grad":
            with torch.no_grad():
                linear_cross_entropy(case.hidden, case.weight, case.targets, chunk_tokens=16)
        else:
            run(case, upstream, chunk_tokens=16)
    assert calls.gemms == gemms * 4
    assert calls.largest <= 16 * 91


@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_costs_no_gemm(upstream: str, frozen: str) -> None:
    case = make_case(tokens=8)
    getattr(case, frozen).requires_grad_(False)
    with Calls() as calls:
        loss = linear_cross_entropy(
            case.hidden, case.weight, case.targets, upstream=upstream, chunk_tokens=8
        ).loss
        loss.sum().backward()
    assert calls.gemms == (2 if upstream == "weighted-scalar" else 3)
    assert getattr(case, frozen).grad is None


@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_the_host_never_waits(upstream: str) -> None:
    from cppmega.proof.host_sync import no_host_sync

    case = make_case()
    with no_host_sync():
        run(case, upstream)


@pytest.mark.parametrize("tokens", [0, 1, 4096, 32768, 49152, 50000])
@pytest.mark.parametrize("vocabulary", [50, 65536, 131072])
def test_default_chunks_fit_the_budget(tokens: int, vocabulary: int) -> None:
    rows = default_chunk_tokens(tokens, vocabulary, 2)
    assert rows > 0
    assert rows % 128 == 0
    assert rows * vocabulary * 2 <= LOGITS_BYTES
    assert rows - 128 < max(tokens, 1)


# Dynamo looks at `.grad` of the loss where it resumes after the break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_under_torch_compile() -> None:
    case = make_case(dtype=torch.float32)

    @torch.compile(backend="eager")
    def step(x: Tensor, w: Tensor) -> Tensor:
        loss = linear_cross_entropy(
            2 * x, w, case.targets, loss_weights=case.weights, upstream="weighted-scalar"
        ).loss
        return (loss * case.weights).sum() + 1

    step(case.hidden, case.weight).backward()
    doubled = case._replace(hidden=2 * case.hidden.detach())
    assert error(case.weight.grad, dense(doubled, case.weights).weight_grad) < 1e-5


# Gradient accumulation fusion


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
    with pytest.raises(CppmegaError, match="linear-ce-main-grad"):
        main_grad_of(weight)


def test_frozen_weight_needs_no_main_grad() -> None:
    case = make_case()
    case.weight.requires_grad_(False)
    out = linear_cross_entropy(
        case.hidden, case.weight, case.targets, gradient_accumulation_fusion=True
    )
    out.loss.sum().backward()
    assert case.hidden.grad is not None


# Backends and arguments


def test_auto_says_once_what_it_chose(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(op, "_said", set())
    monkeypatch.delenv(op.ENVIRONMENT, raising=False)
    case = make_case()
    with caplog.at_level(logging.WARNING):
        outputs = [linear_cross_entropy(*case[:3]) for _ in range(2)]
    assert {out.backend for out in outputs} == {"reference"}
    assert [r.getMessage() for r in caplog.records] == [
        "linear cross-entropy: auto chose reference: the tensors are on cpu"
    ]


def test_environment_names_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    monkeypatch.setenv(op.ENVIRONMENT, "reference")
    assert linear_cross_entropy(*case[:3]).backend == "reference"
    monkeypatch.setenv(op.ENVIRONMENT, "triton")
    with pytest.raises(CppmegaError, match="linear-ce-backend-unavailable"):
        linear_cross_entropy(*case[:3])
    monkeypatch.setenv(op.ENVIRONMENT, "tritn")
    with pytest.raises(CppmegaError, match="linear-ce-backend-unknown"):
        linear_cross_entropy(*case[:3])


@pytest.mark.parametrize("backend", ["liger", "cce"])
def test_a_named_library_refuses_the_cpu(backend: str) -> None:
    case = make_case(dtype=torch.bfloat16)
    with pytest.raises(CppmegaError, match=r"linear-ce-backend-unsupported: .*cpu"):
        linear_cross_entropy(*case[:3], backend=backend)


@pytest.mark.parametrize("field", ["tensor_parallel", "padded", "logit_scale", "main_grad"])
@pytest.mark.parametrize("backend", ["liger", "cce"])
def test_what_a_library_cannot_do(backend: str, field: str) -> None:
    plain = external.Request(False, False, 1.0, False, False, -100)
    wanted = plain._replace(**{field: 2.0 if field == "logit_scale" else True})
    on_cuda = torch.empty(1, dtype=torch.bfloat16, device="meta")

    class Fake:
        device = torch.device("cuda")
        dtype = torch.bfloat16

    external._refuse(backend, Fake(), plain, argmax=False)  # type: ignore[arg-type]
    with pytest.raises(CppmegaError, match="linear-ce-backend-unsupported"):
        external._refuse(backend, Fake(), wanted, argmax=True)  # type: ignore[arg-type]
    with pytest.raises(CppmegaError, match="meta"):
        external._refuse(backend, on_cuda, plain, argmax=True)


def test_cce_has_no_argmax() -> None:
    class Fake:
        device = torch.device("cuda")
        dtype = torch.bfloat16

    want = external.Request(False, False, 1.0, True, False, -100)
    external._refuse("liger", Fake(), want, argmax=True)  # type: ignore[arg-type]
    with pytest.raises(CppmegaError, match="arg-max"):
        external._refuse("cce", Fake(), want, argmax=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["0.8.4", "0.5.0", None])
def test_an_old_or_missing_liger_is_refused(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(package: str) -> str:
        if version is None:
            raise external.importlib.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(external.importlib.metadata, "version", installed)
    with pytest.raises(CppmegaError, match="linear-ce-backend-unavailable"):
        external._installed("liger", "liger-kernel", external.LIGER_MINIMUM)


@pytest.fixture
def fake_liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Liger that is installed, runs on the CPU and returns what the test says."""

    class Function:
        returns: Any = ()

        @classmethod
        def apply(cls, *args: Any) -> Any:
            return cls.returns

    module: Any = type(sys)("liger_kernel.ops.fused_linear_cross_entropy")
    module.LigerFusedLinearCrossEntropyFunction = Function
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(external, "_refuse", lambda *a, **k: None)
    monkeypatch.setattr(external, "_installed", lambda *a: None)
    yield Function


def test_another_return_arity_of_liger_is_refused(fake_liger: Any) -> None:
    case = make_case()
    fake_liger.returns = (case.weights, None)
    with pytest.raises(CppmegaError, match="returned 2 instead of 4"):
        linear_cross_entropy(*case[:3], backend="liger")
    fake_liger.returns = (case.weights, None, None, None)
    out = linear_cross_entropy(*case[:3], backend="liger")
    assert out.backend == "liger"
    assert out.argmax is None
    assert torch.equal(out.loss, case.weights)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": torch.zeros(5, 7)},
        {"targets": torch.zeros(3, dtype=torch.long)},
        {"targets": torch.zeros(4)},
        {"weight": torch.zeros(5, 6, dtype=torch.bfloat16)},
        {"loss_weights": torch.ones(4)},
        {"loss_weights": torch.ones(3), "upstream": "weighted-scalar"},
        {"upstream": "mean"},
        {"hidden_grad": "sum"},
        {"vocab_size": 6},
        {"vocab_size": 0},
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(4, 6),
        "weight": torch.zeros(5, 6),
        "targets": torch.zeros(4, dtype=torch.long),
    }
    with pytest.raises(CppmegaError, match="linear-ce-arguments"):
        linear_cross_entropy(**(arguments | change))


# Processes of their own


def started(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def assert_all_pass(processes: list[subprocess.Popen[str]]) -> None:
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    python = forkserver.executable()
    store = str(tmp_path / "store")
    assert_all_pass([started(python, "-c", ONE_RANK, str(rank), store) for rank in range(2)])


ONE_RANK = """
import sys
from tests.ops.test_linear_cross_entropy import check_rank, torch
torch.manual_seed(0)
check_rank(int(sys.argv[1]), sys.argv[2])
"""


def check_rank(rank: int, store: str) -> None:
    """One of two ranks: every rank must find what the dense computation finds."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    group = torch.distributed.group.WORLD
    # Padding on the second rank; in part, not at all, and nothing but padding on it.
    for vocabulary, padding in ((50, 8), (58, 0), (20, 38)):
        case = make_case(vocabulary=vocabulary, padding=padding, std=3.0)
        shard = case.weight.shape[0] // 2
        mine = slice(rank * shard, (rank + 1) * shard)
        want = dense(case, case.scalar * case.weights)
        want = want._replace(weight_grad=want.weight_grad[mine])
        local = case._replace(weight=case.weight.detach()[mine].clone().requires_grad_())
        for upstream in UPSTREAMS:
            whole = run(local, upstream, tp_group=group, chunk_tokens=8)
            assert_same(whole, want, 1e-12)
            part = run(local, upstream, tp_group=group, chunk_tokens=8, hidden_grad="partial")
            assert error(part.hidden_grad, want.hidden_grad) > 1e-3 or padding > vocabulary
            torch.distributed.all_reduce(part.hidden_grad)
            assert_same(part, want, 1e-12)
    # Equal maxima on both ranks: the lower token id.
    x, w = torch.ones(2, 2), torch.ones(3, 2)
    out = linear_cross_entropy(x, w, torch.tensor([5, 0]), tp_group=group, return_argmax=True)
    assert out.argmax is not None
    assert out.argmax.tolist() == [0, 0]
    torch.testing.assert_close(out.loss, torch.full((2,), 6.0).log())
    torch.distributed.destroy_process_group()


def test_row_kernel_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    in_interpreter.run(INTERPRETED)


INTERPRETED = """
from tests.ops.test_linear_cross_entropy import check_interpreted, torch
torch.manual_seed(0)
check_interpreted()
"""


def check_interpreted() -> None:
    """The Triton kernels against the reference's rows, on the CPU (where bf16 is not exact)."""
    from cppmega.ops import linear_cross_entropy_reference as reference
    from cppmega.ops import linear_cross_entropy_triton as kernels

    kernels.ROW_GROUPS = 4  # several steps per row, as with a real vocabulary
    for dtype, std, vocabulary, columns in (
        (torch.float32, 1.0, 7, 7),
        (torch.float32, 20.0, 203, 190),
        (torch.float16, 5.0, 128, 128),
    ):
        z = torch.randn(5, vocabulary) * std
        z[0, : columns // 2] = z.max()  # equal maxima
        targets = torch.tensor([0, columns - 1, -1, columns // 2, -1])
        weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0])
        logits = kernels.logits_buffer(5, vocabulary, z.to(dtype)).copy_(z)
        assert logits.stride(0) % 64 == 0
        like = logits.float()
        want = reference.statistics(like, targets, columns, True)
        got = kernels.statistics(logits, targets, columns, True)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        same = kernels.logits_buffer(5, vocabulary, logits).copy_(logits)
        again = kernels.statistics_and_gradient_(same, targets, columns, weights, True)
        assert all(torch.equal(a, b) for a, b in zip(again, got, strict=True))
        kernels.gradient_(logits, targets, columns, softmax_of(got), weights)
        torch.testing.assert_close(logits, same, rtol=1e-6, atol=0)  # exp of numpy and of torch
        reference.gradient_(like, targets, columns, softmax_of(want), weights)
        torch.testing.assert_close(logits.float(), like, rtol=2e-3, atol=1e-4)
    nothing = torch.full((2,), -1)
    only_padding = kernels.statistics(torch.randn(2, 64), nothing, 0, True)
    assert bool((only_padding.maximum < -1e38).all())
    assert not only_padding.others.any()
    not_a_number = torch.tensor([[1.0, float("nan"), 2.0, 0.0]])
    for target in (-1, 0, 1):
        found = kernels.statistics(not_a_number, torch.tensor([target]), 4, False)
        assert softmax_of(found).total.isnan().all()
    confident = kernels.logits_buffer(1, 8, torch.zeros(1))
    confident.copy_(torch.tensor([[0.0, 1.0, 20.0, 0.5, -3.0, 2.0, 1.0, 0.0]]))
    others = (confident[0, [0, 1, 3, 4, 5, 6, 7]].double() - 20).exp().sum()
    kernels.statistics_and_gradient_(confident, torch.tensor([2]), 8, torch.ones(1), False)
    torch.testing.assert_close(-confident[0, 2].double(), others / (1 + others), rtol=1e-6, atol=0)
    source = torch.randn(5001)
    scaled = kernels.scaled(source, torch.tensor(0.3), torch.float16)
    assert torch.equal(scaled, (source * torch.tensor(0.3)).to(torch.float16))
    assert kernels.scaled(source[:0], torch.tensor(0.3), torch.float16).shape == (0,)


# GPU


@contextlib.contextmanager
def cuda_never_waits() -> Iterator[None]:
    """Raise where the host would wait for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def rounded(case: Case) -> Dense:
    """What rounding the logits alone costs: the unfused path with bf16 logits, the rest in fp64."""
    x = case.hidden.detach().double().requires_grad_()
    w = case.weight.detach().double().requires_grad_()
    logits = x @ w[: case.vocab_size].t()
    seen = logits + (logits.to(case.hidden.dtype).double() - logits).detach()
    loss = cross_entropy(seen, case.targets, reduction="none", ignore_index=-100)
    grads = torch.autograd.grad(loss, (x, w), (case.scalar * case.weights).double())
    return Dense(loss.detach(), seen.argmax(1), *grads)


@pytest.mark.gpu
@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize(
    ("dtype", "std"),
    [
        (torch.bfloat16, 1.0),
        (torch.bfloat16, 5.0),
        (torch.bfloat16, 20.0),
        (torch.float16, 5.0),
        (torch.float32, 5.0),
    ],
)
@pytest.mark.parametrize(("vocabulary", "padding"), [(4096, 0), (5001, 119)])
def test_triton_on_the_gpu(
    upstream: str, dtype: torch.dtype, std: float, vocabulary: int, padding: int
) -> None:
    case = make_case(1000, 256, vocabulary, padding, std, dtype, device="cuda")
    got = run(case, upstream, chunk_tokens=384)
    want = dense(case, case.scalar * case.weights)
    logits_rounded = rounded(case)
    eps = torch.finfo(dtype).eps
    allowed = 1e-5 if dtype == torch.float32 else 2 * eps
    for name in ("loss", "hidden_grad", "weight_grad"):
        limit = 2 * error(getattr(logits_rounded, name), getattr(want, name)) + allowed
        assert error(getattr(got, name), getattr(want, name)) <= limit, name
    again = run(case, upstream, chunk_tokens=384)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("doubt", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize(
    ("dtype", "level"),
    [
        (torch.bfloat16, 20.0),
        (torch.float16, 20.0),
        (torch.float32, 20.0),
        (torch.float32, 80.0),
    ],
)
def test_confident_tokens_on_the_gpu(
    upstream: str, doubt: float, dtype: torch.dtype, level: float
) -> None:
    case = confident_case(doubt, level, dtype, "cuda", tokens=600)
    if dtype == torch.float16:
        # A loss scaler's, without which the result itself would underflow.
        case = case._replace(scalar=2.0 ** -round(math.log2(16 * doubt)))
    got, want, stock = run(case, upstream, chunk_tokens=256), unrounded(case), by_log_softmax(case)
    eps = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    for name in ("loss", "hidden_grad", "weight_grad"):
        limit = 1.2 * error(getattr(stock, name), getattr(want, name)) + eps
        assert error(getattr(got, name), getattr(want, name)) <= limit, name
        if name != "loss":
            assert error(getattr(got, name), getattr(want, name)) <= 2 * eps


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_counted_tokens_on_the_gpu(dtype: torch.dtype) -> None:
    case = make_case(1000, 256, 5001, 119, 3.0, dtype, device="cuda")
    bound = int(((case.weights != 0) & (case.targets != -100)).sum())
    run(case, "weighted-scalar", counted_tokens=bound, chunk_tokens=384)  # compiles
    with cuda_never_waits():
        got = run(case, "weighted-scalar", counted_tokens=bound, chunk_tokens=384)
    want, all_rows = dense(case, case.scalar * case.weights), run(case, "weighted-scalar")
    for name in ("hidden_grad", "weight_grad"):
        limit = 1.1 * error(getattr(all_rows, name), getattr(want, name))
        assert error(getattr(got, name), getattr(want, name)) <= limit, name
    again = run(case, "weighted-scalar", counted_tokens=bound, chunk_tokens=384)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("fused", [False, True])
def test_cuda_graph_and_no_sync(upstream: str, fused: bool) -> None:
    case = make_case(600, 128, 3000, 0, 2.0, torch.bfloat16, device="cuda")
    weight: Any = case.weight
    weight.main_grad = torch.zeros(weight.shape, device="cuda")
    weight.grad_added_to_main_grad = False
    options: dict[str, Any] = {"chunk_tokens": 256, "gradient_accumulation_fusion": fused}
    run(case, upstream, **options)
    torch.cuda.synchronize()
    with cuda_never_waits():
        weight.main_grad.zero_()
        eager = run(case, upstream, **options)
    expected = weight.main_grad.clone() if fused else eager.weight_grad
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.main_grad.zero_()
        captured = run(case, upstream, **options)
    captured.hidden_grad.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.hidden_grad, eager.hidden_grad)
    assert torch.equal(weight.main_grad if fused else captured.weight_grad, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["liger", "cce"])
def test_libraries_on_the_gpu(backend: str) -> None:
    pytest.importorskip({"liger": "liger_kernel", "cce": "cut_cross_entropy"}[backend])
    case = make_case(1000, 256, 4096, 0, 2.0, torch.bfloat16, device="cuda")
    loss = linear_cross_entropy(*case[:3], backend=backend).loss
    grads = torch.autograd.grad(loss, case[:2], case.scalar * case.weights)
    want = dense(case, case.scalar * case.weights)
    assert error(loss, want.loss) < 1e-2
    assert error(grads[0], want.hidden_grad) < 2e-2
    assert error(grads[1], want.weight_grad) < 2e-2


@pytest.mark.gpu
def test_a_broken_promise_stops_the_device() -> None:
    process = started(sys.executable, __file__)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert "linear_ce_some_patch: the gradient" in output


def check_broken() -> None:
    """Break the promise on CUDA; the process must not survive it."""
    case = make_case(300, 64, 500, 0, 1.0, torch.bfloat16, device="cuda")
    linear_cross_entropy(
        *case[:3],
        loss_weights=case.weights,
        upstream="weighted-scalar",
        caller="linear_ce_some_patch",
    ).loss.sum().backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    torch.manual_seed(0)
    check_broken()
