"""Linear cross-entropy on a GPU; run as a script, it breaks a promise, which stops the device."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import cross_entropy  # noqa: E402

from cppmega.ops.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from tests.ops.linear_cross_entropy.cases import (  # noqa: E402
    UPSTREAMS,
    Case,
    Dense,
    confident_case,
    dense,
    error,
    make_case,
    promised,
    run,
    unrounded,
)
from tests.support import PATIENCE  # noqa: E402
from tests.support.processes import started  # noqa: E402

pytestmark = pytest.mark.slow


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


def by_log_softmax(case: Case) -> Dense:
    """The unfused path's arithmetic: fp32 over materialised logits, gradients rounded once."""
    x, w = (t.detach().clone().requires_grad_() for t in (case.hidden, case.weight))
    loss = cross_entropy((x @ w.t()).float(), case.targets, reduction="none")
    grads = torch.autograd.grad(loss, (x, w), case.scalar * case.weights)
    return Dense(loss.detach(), case.targets, *grads)


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
def test_liger_on_the_gpu() -> None:
    pytest.importorskip("liger_kernel")
    case = make_case(1000, 256, 4096, 0, 2.0, torch.bfloat16, device="cuda")
    loss = linear_cross_entropy(*case[:3], backend="liger").loss
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
    promised(case, caller="linear_ce_some_patch").sum().backward()
    torch.cuda.synchronize()


if __name__ == "__main__":
    torch.manual_seed(0)
    check_broken()
