"""The weighted GELU of experts in one kernel per direction."""

from __future__ import annotations

import pytest
import torch

from cppmega.ops.pointwise import weighted_gelu
from cppmega.ops.pointwise import weighted_gelu_naive as weighted_gelu_reference
from tests.ops.in_interpreter import run
from tests.ops.kernel_memory import check_fits, record
from tests.ops.launch_counts import modules_of
from tests.ops.pointwise import weighted_gelu_checks

CHECKS = """
import torch
from cppmega.ops.pointwise import weighted_gelu_triton
from tests.ops.pointwise import weighted_gelu_checks

for columns in (16, 1024):
    weighted_gelu_triton.COLUMNS = columns
    for dtype in (torch.float32, torch.float16):
        weighted_gelu_checks.check(dtype, 9, 37, "cpu")
        weighted_gelu_checks.check(dtype, 1, 64, "cpu")
        weighted_gelu_checks.check(dtype, 0, 8, "cpu")
"""


def test_the_reference_has_the_gradients_of_autograd() -> None:
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(7, 1, dtype=torch.float64, requires_grad=True)
    given = torch.randn(7, 5, dtype=torch.float64)
    out = weighted_gelu_reference.weighted_gelu(x, weights)
    wanted = torch.autograd.grad(out, (x, weights), given)
    found = weighted_gelu_reference.gradients(x, weights, given)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other)


def test_results_are_those_of_fp32_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run(CHECKS)


def test_what_the_kernel_does_not_support_is_said() -> None:
    pytest.importorskip("triton")
    x, weights = torch.zeros(4, 8).bfloat16(), torch.zeros(4, 1)
    assert weighted_gelu.obstacle(x, weights) is None
    for call in (
        (x.double(), weights),
        (x, weights.bfloat16()),
        (x, weights[:3]),
        (x, weights.flatten()),
        (x[None], weights),
    ):
        assert weighted_gelu.obstacle(*call)


@pytest.mark.slow
def test_the_kernel_compiles_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    modules = modules_of("pointwise", "weighted_gelu")
    found = record(monkeypatch, modules)
    x = torch.zeros(8, 896).bfloat16().requires_grad_()
    weights = torch.zeros(8, 1, requires_grad=True)
    weighted_gelu.weighted_gelu(x, weights).backward(torch.zeros(8, 896).bfloat16())
    check_fits(found, modules)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_results_are_those_of_fp32_on_cuda(dtype: torch.dtype) -> None:
    for rows, width in ((16384, 896), (777, 200), (5, 3000), (1, 1), (0, 896)):
        weighted_gelu_checks.check(dtype, rows, width, "cuda")
