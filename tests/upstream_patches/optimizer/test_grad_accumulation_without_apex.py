"""A real layer adds its gradients to fp32 within the product, with apex and without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from cppmega.catalogue import loader as catalogue
from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "grad_accumulation_without_apex"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_layer(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.tensor_parallel import layers

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    with pytest.raises(RuntimeError, match="gradient_accumulation_fusion"):
        made(stock.module("megatron.core.tensor_parallel.layers"))
    for kind, total in (
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ):
        with mock.patch.object(layers, "_grad_accum_fusion_available", False):
            layer = made(layers, kind, total)
            exact = trained(layer, steps=64)
        error = (layer.weight.main_grad.double() - exact).norm() / exact.norm()
        # Without the fusion, each step's gradient is rounded to bf16.
        assert error < (1e-6 if total == torch.float32 else 2e-2), (kind, total, error)
        assert layer.weight.grad is not None and layer.weight.grad_added_to_main_grad is True

    apex = mock.MagicMock()
    with (
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", apex, create=True),
    ):
        layer = made(layers)
        trained(layer, steps=1)
    assert apex.wgrad_gemm_accum_fp32.call_count == 1
    assert not layer.weight.main_grad.any(), "apex's kernel is the only one that adds"


def made(module: Any, kind: torch.dtype = torch.float32, total: torch.dtype = torch.float32) -> Any:
    """A layer of 8 by 6 with its buffer."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=True,
        params_dtype=kind,
    )
    initial = torch.nn.init.normal_
    layer = module.ColumnParallelLinear(8, 6, config=config, init_method=initial, bias=False)
    layer.weight.main_grad = torch.zeros(6, 8, dtype=total)
    layer.weight.grad_added_to_main_grad = False
    return layer


def trained(layer: Any, steps: int) -> torch.Tensor:
    """Run some micro-batches; returns the exact sum of the gradients."""
    drawn = torch.Generator().manual_seed(3)
    exact = torch.zeros(6, 8, dtype=torch.float64)
    for _ in range(steps):
        x = torch.randn(5, 2, 8, generator=drawn).to(layer.weight.dtype)
        upstream = torch.randn(5, 2, 6, generator=drawn).to(layer.weight.dtype)
        layer(x)[0].backward(upstream)
        exact += upstream.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
    return exact


def test_which_runs_must_reach_it() -> None:
    when = catalogue.load()[PAGE].patch.when
    assert when is not None
    assert when(SimpleNamespace(gradient_accumulation_fusion=True))
    assert not when(SimpleNamespace(gradient_accumulation_fusion=False))
    assert not when(SimpleNamespace())
