"""The fused cross entropy against torch's, and against stock where stock was right."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "fused_cross_entropy_grad_dtype"
BITS = {torch.float64: 2**-20, torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Relative precision to be met; the computation itself is in float32."""


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_gradient(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.fusions import fused_cross_entropy as patched

    unpatched = stock.module("megatron.core.fusions.fused_cross_entropy")
    for dtype, precision in BITS.items():
        loss, gradient = outcome(patched, dtype)
        stock_loss, stock_gradient = outcome(unpatched, dtype)
        assert torch.equal(loss, stock_loss)
        assert gradient.dtype == dtype
        wanted = plain_gradient(dtype)
        torch.testing.assert_close(gradient.double(), wanted, rtol=precision, atol=1e-7)
        if dtype == torch.bfloat16:
            assert torch.equal(gradient, stock_gradient)
        else:  # the test can tell the two apart
            assert (stock_gradient.double() - wanted).abs().max() > 1e-3
    compiles_without_a_break(patched)


def logits_and_target(dtype: Any) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(9, 2, 40, generator=generator)
    return logits.to(dtype), torch.randint(40, (9, 2), generator=generator)


def outcome(module: ModuleType, dtype: Any) -> tuple[Any, Any]:
    logits, target = logits_and_target(dtype)
    logits.requires_grad_()
    one_rank = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    with (
        mock.patch.object(torch.distributed, "all_reduce", lambda *_, **__: None),
        torch.compiler.set_stance("force_eager"),
    ):
        given = logits * 1  # the loss overwrites its input
        loss = module.fused_vocab_parallel_cross_entropy(given, target, one_rank)
        (loss * torch.arange(1, 19).view(9, 2)).sum().backward()
    return loss.detach(), logits.grad


def plain_gradient(dtype: Any) -> Any:
    logits, target = logits_and_target(dtype)
    logits = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(logits.permute(0, 2, 1), target, reduction="none")
    (losses * torch.arange(1, 19).view(9, 2)).sum().backward()
    return logits.grad


def compiles_without_a_break(module: ModuleType) -> None:
    """The dtype is an argument of a compiled function, which also contains the reached-mark."""
    function = torch.compile(
        module.calculate_gradients._torchdynamo_orig_callable, backend="eager", fullgraph=True
    )
    softmax = torch.softmax(torch.randn(4, 8), -1)
    for dtype in (torch.float32, torch.bfloat16):
        gradient = function(
            softmax.clone(), torch.ones(4), torch.zeros(4).bool(), torch.arange(4), dtype
        )
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, (softmax - torch.eye(4, 8)).to(dtype))
