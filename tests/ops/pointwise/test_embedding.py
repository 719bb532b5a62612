"""Gradients of an embedding's rows are added to `main_grad` in one order, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cppmega.ops.common.main_grad import MainGrad  # noqa: E402
from cppmega.ops.pointwise import embedding  # noqa: E402
from tests.ops.in_interpreter import run  # noqa: E402
from tests.ops.kernel_memory import check_fits, record  # noqa: E402
from tests.ops.launch_counts import modules_of  # noqa: E402
from tests.ops.pointwise import embedding_checks  # noqa: E402

CHECKS = """
import torch
from tests.ops.pointwise.embedding_checks import check, ids_of

b16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
for layout in ("plain", "transposed", "expanded"):
    check(b16, f32, 5, ids_of(2, 19), layout)
check(b16, b16, 5, ids_of(1, 19))
check(f32, f32, 300, ids_of(3, 11))
check(f16, f32, 7168 + 3, ids_of(1, 19))
check(b16, f32, 5, ids_of(2, 19), masked=ids_of(2, 19) == 7)
check(b16, f32, 3, torch.full((1, 2000), 4))
check(b16, f32, 3, torch.zeros(2, 0, dtype=torch.int64))
"""


def test_rows_are_added_by_the_kernel_in_the_interpreter() -> None:
    run(CHECKS)


@pytest.mark.parametrize(("zeros", "fills"), [(False, 0), (True, 1)])
def test_a_backward_pass_has_one_placeholder(
    monkeypatch: pytest.MonkeyPatch, zeros: bool, fills: int
) -> None:
    """Autograd adds no placeholders of several lookups, each of which is as large as the table."""
    (kernels,) = modules_of("pointwise", "embedding")
    monkeypatch.setattr(kernels, "add", lambda *given: None)
    weight: Any = embedding_checks.weight_of(torch.bfloat16, torch.float32, 8, "cpu")
    weight.zero_out_wgrad = zeros
    ids, main = embedding_checks.ids_of(2, 5), MainGrad.of(weight)
    assert main is not None
    for _ in range(2):  # micro-batches
        arrived = []
        node = weight.view_as(weight).grad_fn.next_functions[0][0]
        node.register_prehook(lambda given, arrived=arrived: arrived.extend(given))
        outs = [embedding.lookup(main, ids) for _ in range(3)]
        with torch.autograd.profiler.profile() as profile:
            torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
        calls = {event.key: event.count for event in profile.key_averages()}
        assert calls.get("aten::zeros", 0) == fills and "aten::add_" not in calls
        assert [each.shape for each in arrived] == [weight.shape]
        assert not zeros or not weight.grad.any()
        weight.grad = None


def test_sums_that_the_kernel_does_not_support() -> None:
    weight: Any = embedding_checks.weight_of(torch.bfloat16, torch.float32, 8, "cpu")
    right = weight.main_grad
    assert embedding.obstacle(MainGrad(weight, right)) is None
    for wrong in (right.double(), right.t().contiguous().t(), right[:-1]):
        assert embedding.obstacle(MainGrad(weight, wrong)) is not None
    assert embedding.obstacle(MainGrad(weight.double(), right)) is not None


@pytest.mark.slow
def test_the_kernel_compiles_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = modules_of("pointwise", "embedding")
    found = record(monkeypatch, modules)
    for of_total in (torch.bfloat16, torch.float32):
        weight = embedding_checks.weight_of(torch.bfloat16, of_total, 7168, "cpu")
        main = MainGrad.of(weight)
        assert main is not None
        out = embedding.lookup(main, embedding_checks.ids_of(1, 64))
        out.backward(torch.zeros_like(out))  # type: ignore[no-untyped-call]
    check_fits(found, modules)


@pytest.mark.gpu
@pytest.mark.parametrize("of_total", [torch.bfloat16, torch.float32])
def test_rows_are_added_on_cuda(of_total: torch.dtype) -> None:
    ids = embedding_checks.ids_of(2, 3001)
    for dim, layout in ((7168, "transposed"), (7168 + 3, "plain"), (5, "expanded")):
        embedding_checks.check(
            torch.bfloat16, of_total, dim, ids, layout, masked=ids == 7, device="cuda"
        )
    embedding_checks.check(torch.float32, of_total, 2048, ids, device="cuda")
