"""The gradients of a router are stock's, and patched code calls the kernel for them.

`tests/ops/pointwise/test_router_gating.py` compares the kernel with its reference.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "router_gating_backward"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_gradients(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.transformer.moe import moe_utils as patched

    from cppmega.ops.pointwise import router_gating
    from cppmega.ops.pointwise import router_gating_naive as router_gating_reference

    unpatched = stock.module("megatron.core.transformer.moe.moe_utils")
    for biased in (False, True):
        for score in (torch.float32, torch.float64, torch.bfloat16):
            wanted = gradients(unpatched, biased, score)
            on_cpu = gradients(patched, biased, score)
            with one_process.by_reference(
                router_gating, "gradients", router_gating_reference.gradients
            ) as kernel:
                found = gradients(patched, biased, score)
            assert kernel.call_count == (score == torch.float32)  # --moe-router-dtype fp32
            for mine, host, expected in zip(found, on_cpu, wanted, strict=True):
                assert torch.equal(mine, expected) and torch.equal(host, expected)


def gradients(module: Any, biased: bool, score: Any) -> tuple[Any, ...]:
    """Of hidden states, weight and bias, through the function that routers call."""
    drawn = torch.Generator().manual_seed(1)
    shapes = ((7, 2, 16), (5, 16), *([(5,)] if biased else []))
    leaves = [torch.randn(shape, generator=drawn).bfloat16().requires_grad_() for shape in shapes]
    inp, weight, *bias = leaves
    with mock.patch.object(module, "te_general_gemm", None, create=True):
        scores = module.router_gating_linear(inp, weight, bias[0] if bias else None, score)
        upstream = torch.randn(scores.shape, generator=drawn, dtype=score)
        return torch.autograd.grad(scores, leaves, upstream)
