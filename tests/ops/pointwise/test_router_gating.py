"""The backward of a router's scores in one kernel."""

from __future__ import annotations

import pytest
import torch

from cppmega.ops.pointwise import router_gating
from tests.ops.in_interpreter import run
from tests.ops.kernel_memory import check_fits, record
from tests.ops.launch_counts import modules_of
from tests.ops.pointwise import router_gating_checks

CHECKS = """
import torch
from cppmega.ops.pointwise import router_gating_triton
from tests.ops.pointwise import router_gating_checks

router_gating_triton.PART = 100
router_gating_checks.check(torch.float16, torch.float16, 333, 150, 5, "cpu")
router_gating_checks.check(torch.float16, torch.float32, 64, 128, 16, "cpu")
router_gating_checks.check(torch.float16, torch.float16, 1, 8, 20, "cpu")
"""


def test_gradients_are_those_of_fp32_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run(CHECKS)


def test_what_the_kernel_does_not_support_is_said() -> None:
    pytest.importorskip("triton")
    inp, weight, given = torch.zeros(4, 8).bfloat16(), torch.zeros(2, 8), torch.zeros(4, 2)
    assert router_gating.obstacle(inp, weight, given) is None
    for call in (
        (inp.float(), weight, given),
        (inp, weight, given.double()),
        (inp, weight.double(), given),
        (inp, weight.new_zeros(router_gating.MOST_EXPERTS + 1, 8), given),
    ):
        assert router_gating.obstacle(*call)


@pytest.mark.slow
def test_the_kernel_compiles_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    modules = modules_of("pointwise", "router_gating")
    found = record(monkeypatch, modules)
    for experts in (16, router_gating.MOST_EXPERTS):
        inp, weight = torch.zeros(2048, 512).bfloat16(), torch.zeros(experts, 512).bfloat16()
        router_gating.gradients(inp, weight, torch.zeros(2048, experts))
    check_fits(found, modules)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_those_of_fp32_on_cuda(dtype: torch.dtype) -> None:
    for tokens, hidden, experts in ((16384, 4096, 16), (777, 200, 5), (4096, 1024, 128)):
        router_gating_checks.check(dtype, dtype, tokens, hidden, experts, "cuda")
        router_gating_checks.check(dtype, torch.float32, tokens, hidden, experts, "cuda")
