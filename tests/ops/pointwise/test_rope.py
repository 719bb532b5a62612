"""Rotary embedding: one kernel, and Megatron's roundings."""

from __future__ import annotations

import itertools

import pytest
import torch

from cppmega.ops.pointwise import rope
from tests.ops.in_interpreter import run
from tests.ops.kernel_memory import check_fits, record
from tests.ops.launch_counts import modules_of
from tests.ops.pointwise import rope_checks

CHECKS = """
import torch
from cppmega.ops.pointwise import rope_triton
from tests.ops.pointwise import rope_checks

for elements in (64, 8192):
    rope_triton.ELEMENTS = elements
    for dtype in (torch.float16, torch.float32):  # the interpreter truncates to bf16
        rope_checks.check(dtype, 5, 2, 3, 8, 8, "cpu")
        rope_checks.check(dtype, 7, 1, 1, 13, 6, "cpu", start=5)
"""


def test_it_is_megatrons_to_the_bit_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run(CHECKS)


def test_what_the_kernel_does_not_support_is_said() -> None:
    pytest.importorskip("triton")
    t, angles = torch.zeros(4, 2, 3, 8), torch.zeros(4, 1, 1, 8)
    assert rope.obstacle(t, angles, False, True) is None
    for given, by, adjacent in (
        (t.double(), angles, False),
        (t, angles.double(), False),
        (t[0], angles, False),
        (t, angles[:3], False),
        (t, angles[..., :5], False),
        (t[..., :6], angles, False),
        (t, angles.clone().requires_grad_(), False),
        (t, angles, True),
    ):
        assert rope.obstacle(given, by, adjacent, True)


@pytest.mark.slow
def test_the_kernel_compiles_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    modules = modules_of("pointwise", "rope")
    found = record(monkeypatch, modules)
    for dtype, (adjacent, gathered) in itertools.product(
        (torch.bfloat16, torch.float32), rope_checks.WAYS
    ):
        t = torch.zeros(64, 2, 32, 96, dtype=dtype, requires_grad=True)
        out = rope.rotated(t, torch.zeros(64, 1, 1, 64), adjacent, gathered)
        out.backward(torch.zeros_like(out))  # type: ignore[no-untyped-call]
    check_fits(found, modules)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_megatrons_to_the_bit_on_cuda(dtype: torch.dtype) -> None:
    for s, b, heads, d, width in ((4096, 2, 32, 64, 64), (4096, 2, 1, 64, 64), (333, 3, 5, 96, 64)):
        rope_checks.check(dtype, s, b, heads, d, width, "cuda")
    rope_checks.check(dtype, 333, 2, 5, 192, 64, "cuda", start=128)
