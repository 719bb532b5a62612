"""MLA's queries, keys and values: one kernel each way, and Megatron's bits."""

from __future__ import annotations

import pytest
import torch

from cppmega.ops.pointwise import mla_heads
from tests.ops.in_interpreter import run
from tests.ops.kernel_memory import check_fits, record
from tests.ops.launch_counts import modules_of
from tests.ops.pointwise import mla_heads_checks

CHECKS = """
import torch
from cppmega.ops.pointwise import rope_triton
from tests.ops.pointwise import mla_heads_checks

for elements in (64, 8192):
    rope_triton.ELEMENTS = elements
    for dtype in (torch.float16, torch.float32):  # the interpreter truncates to bf16
        mla_heads_checks.check(dtype, 5, 2, 3, 5, 6, 7, 6, "cpu")
        mla_heads_checks.check(dtype, 3, 1, 1, 8, 4, 8, 4, "cpu")
        mla_heads_checks.check(dtype, 3, 2, 2, 7, 8, 0, 6, "cpu")  # not all of r turn
        mla_heads_checks.check(dtype, 3, 1, 3, 0, 2, 5, 2, "cpu")
        mla_heads_checks.check(dtype, 0, 2, 3, 5, 6, 7, 6, "cpu")
"""


def test_it_is_megatrons_to_the_bit_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run(CHECKS)


def test_what_the_kernels_do_not_support_is_said() -> None:
    pytest.importorskip("triton")
    q, kv, k_pos = torch.zeros(4, 2, 3, 8), torch.zeros(4, 2, 3, 9), torch.zeros(4, 2, 1, 4)
    angles = torch.zeros(4, 1, 1, 4)
    assert mla_heads.obstacle(q, kv, k_pos, angles) is None
    for call in (
        (q.double(), kv.double(), k_pos.double(), angles),
        (q, kv.bfloat16(), k_pos, angles),
        (q, kv, k_pos, angles.double()),
        (q, kv, k_pos, angles.clone().requires_grad_()),
        (q[:, 0], kv[:, 0], k_pos[:, 0], angles),
        (q[:, 0], kv, k_pos, angles),
        (q, kv[:, :1], k_pos, angles),
        (q, kv[..., :3], k_pos, angles),
        (q, kv, k_pos.expand(4, 2, 3, 4), angles),
        (q[..., :3], kv, k_pos, angles[..., :2]),
        (q, kv, k_pos, torch.zeros(4, 1, 1, 6)),
    ):
        assert mla_heads.obstacle(*call)


@pytest.mark.slow
def test_the_kernels_compile_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    modules = modules_of("pointwise", "mla_heads") + modules_of("pointwise", "rope")
    found = record(monkeypatch, modules)
    for dtype, heads in ((torch.bfloat16, 128), (torch.bfloat16, 3), (torch.float32, 32)):
        q, kv = (torch.zeros(64, 2, heads, n, dtype=dtype) for n in (192, 256))
        leaves = [x.requires_grad_() for x in (q, kv, torch.zeros(64, 2, 1, 64, dtype=dtype))]
        out = mla_heads.query_key_value(*leaves, torch.zeros(64, 1, 1, 64))
        torch.autograd.grad(out, leaves, [torch.zeros_like(x) for x in out])
    check_fits(found, modules)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_megatrons_to_the_bit_on_cuda(dtype: torch.dtype) -> None:
    for sizes in (
        (4096, 1, 128, 128, 64, 128, 64),
        (2048, 2, 32, 64, 64, 64, 64),
        (333, 3, 5, 72, 40, 56, 24),
        (7, 1, 1, 5, 6, 7, 6),
    ):
        mla_heads_checks.check(dtype, *sizes, "cuda")
