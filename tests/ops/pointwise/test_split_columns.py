"""Columns are split without copies, and their gradients joined without a rounding."""

from __future__ import annotations

import pytest
import torch

from cppmega.ops.pointwise import split_columns as op
from tests.ops.in_interpreter import run
from tests.ops.kernel_memory import check_fits, record
from tests.ops.launch_counts import modules_of
from tests.ops.pointwise import split_columns_checks

CHECKS = """
import torch
from tests.ops.pointwise import split_columns_checks

split_columns_checks.check(torch.float16, 13, 3)
split_columns_checks.check(torch.float32, 5, 1)
split_columns_checks.check(torch.bfloat16, 0, 2)
"""


def test_columns_are_joined_by_the_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run(CHECKS)


def test_columns_are_joined_by_torch() -> None:
    split_columns_checks.check(torch.bfloat16, 7, 2)


def test_widths_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[3, 4\] columns of \[2, 1, 8\]"):
        op.split_columns(torch.zeros(2, 1, 8), (3, 4))


@pytest.mark.slow
def test_the_kernel_compiles_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    modules = modules_of("pointwise", "split_columns")
    found = record(monkeypatch, modules)
    monkeypatch.setattr(op, "_by_kernel", lambda tensor: True)
    projected = torch.zeros(64, 2, 1024, dtype=torch.bfloat16, requires_grad=True)
    parts = op.split_columns(projected, (768, 256))
    sum(part.sum() for part in parts).backward()
    check_fits(found, modules)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_columns_are_joined_on_cuda(dtype: torch.dtype) -> None:
    for s, b in ((4096, 4), (333, 1)):
        split_columns_checks.check(dtype, s, b, "cuda")
