"""A layer of DSA's attention reads no weight before DDP has gathered it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.catalogue import loader as catalogue
from tests.upstream_patches import one_process
from tests.upstream_patches.dsa.absorbed_layers import ABSORBED, SHAPE, built, linear

torch = pytest.importorskip("torch")

PAGE = "absorbed_mla_gathered_weight"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_the_weight_has_arrived(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def test_which_runs_must_reach_it() -> None:
    when = catalogue.load()[PAGE].patch.when
    run = {"experimental_attention_variant": "dsa", "overlap_param_gather": True}
    assert when is not None and when(SimpleNamespace(**run))
    assert not when(SimpleNamespace(**run | {"overlap_param_gather": False}))
    assert not when(SimpleNamespace(**run | {"experimental_attention_variant": None}))


def check(stock: one_process.Stock) -> None:
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    check_late_weights(absorbed_mla, are_waited_for=True)
    check_late_weights(stock.module(ABSORBED), are_waited_for=False)
    check_gathers_end(absorbed_mla, all_of_them=True)
    check_gathers_end(stock.module(ABSORBED), all_of_them=False)


def check_late_weights(module: Any, are_waited_for: bool) -> None:
    """In forward and backward, by a layer whose parameters arrive as their modules are called."""
    from tests.configurations.late import is_same_late

    layer = layer_of(module)
    assert is_same_late(layer, lambda: trained(layer)) is are_waited_for


def check_gathers_end(module: Any, all_of_them: bool) -> None:
    """By Megatron's own DDP, each parameter in a bucket of its own, in the forward pass."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    config = DistributedDataParallelConfig(**options, overlap_param_gather=True, bucket_size=1)
    layer = layer_of(module)
    ddp = DistributedDataParallel(layer.config, config, layer)
    ddp.start_param_sync()
    ddp(given(), attention_mask=None)
    left = [group for group in ddp.bucket_groups if group.param_gather_handle is not None]
    assert len(left) == (0 if all_of_them else 1)


def layer_of(module: Any) -> Any:
    """A layer of the patched module or of stock's, with the same weights."""
    torch.manual_seed(0)
    return built(module, linear())


def given() -> Any:
    """An input of five tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 1, SHAPE["hidden_size"], generator=generator)


def trained(layer: Any) -> list[Any]:
    """Output and gradients."""
    layer.zero_grad()
    output, _ = layer(given(), attention_mask=None)
    output.square().sum().backward()
    return [output.detach(), *(weight.grad.clone() for weight in layer.parameters())]
