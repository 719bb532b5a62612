"""Work and memory of linear cross-entropy: GEMMs, chunks, waits of the host, and torch.compile."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from cppmega.ops.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from cppmega.ops.linear_cross_entropy.chunks import LOGITS_BYTES, default_chunk_tokens  # noqa: E402
from tests.ops.linear_cross_entropy.cases import (  # noqa: E402
    UPSTREAMS,
    Calls,
    dense,
    error,
    make_case,
    run,
)

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize(("tokens", "hidden"), [(8, 64), (64, 8)])
def test_the_smaller_of_logits_and_gradient_is_held(tokens: int, hidden: int) -> None:
    case = make_case(tokens=tokens, hidden=hidden, vocabulary=91, dtype=torch.float32)
    case.weight.main_grad = torch.zeros_like(case.weight)
    held: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        given = any(tensor is one for one in (case.hidden, case.weight))
        held.append(0 if given else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_cross_entropy(
            *case[:3],
            upstream="weighted-scalar",
            gradient_accumulation_fusion=True,
            chunk_tokens=16,
        )
    assert max(held) == 8 * 91


@pytest.mark.parametrize("upstream", ["weighted-scalar", "arbitrary"])
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
