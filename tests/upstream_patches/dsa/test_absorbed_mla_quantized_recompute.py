"""With a stand-in for FP8, DSA's recomputed up projection equals that of the forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest

from cppmega.catalogue import loader as catalogue
from tests.upstream_patches import one_process
from tests.upstream_patches.dsa.absorbed_layers import ABSORBED, SHAPE, built, linear
from tests.upstream_patches.recomputation import share

torch = pytest.importorskip("torch")

PAGE = "absorbed_mla_quantized_recompute"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_recompute_is_quantized(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def test_which_runs_must_reach_it() -> None:
    when = catalogue.load()[PAGE].patch.when
    run = {
        "experimental_attention_variant": "dsa",
        "fp8": "hybrid",
        "recompute_granularity": "selective",
        "recompute_modules": ["mla_up_proj"],
    }
    assert when is not None and when(SimpleNamespace(**run))
    hybrid = {"experimental_attention_variant": None, "hybrid_layer_pattern": "MDM"}
    assert when(SimpleNamespace(**(run | hybrid)))
    assert when(SimpleNamespace(**(run | {"fp8": None, "fp4": "e2m1"})))
    for other in (
        {"fp8": None},
        {"experimental_attention_variant": None},
        {"recompute_modules": ["core_attn"]},
        {"recompute_granularity": None},
    ):
        assert not when(SimpleNamespace(**(run | other))), other


def check(stock: one_process.Stock) -> None:
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    unpatched = stock.module(ABSORBED)
    with transformer_engine():
        plain = trained(absorbed_mla, levels=None)
        for levels in (4, 16):
            wanted = trained(absorbed_mla, levels)
            assert not torch.equal(wanted[0], plain[0]), "nothing was quantized"
            for quantized in ("fp8", "fp4"):
                got = trained(absorbed_mla, levels, recompute=quantized)
                assert all(map(torch.equal, got, wanted))
                with pytest.raises(AssertionError, match="FP8/FP4 is not supported"):
                    trained(unpatched, levels, recompute=quantized)
        for module in (absorbed_mla, unpatched):  # without quantization stock recomputes too
            assert all(map(torch.equal, trained(module, None, recompute="nothing"), plain))


def trained(module: Any, levels: int | None, recompute: str = "") -> list[Any]:
    """Return output and gradients of a layer whose products are rounded to some levels."""
    torch.manual_seed(0)
    layer = built(module, linear(Rounding.of), recompute)
    given = torch.randn(5, 1, SHAPE["hidden_size"], requires_grad=True)
    with Rounding.autocast(levels is not None, levels):
        output, _ = layer(given, attention_mask=None)
    output.square().sum().backward()
    weights = [weight.grad for weight in layer.parameters()]
    return [output.detach(), given.grad, *weights]


class Rounding:
    """Replaces Transformer Engine's FP8 state: the number of levels for rounded products."""

    levels: ClassVar[int | None] = None

    @classmethod
    @contextlib.contextmanager
    def autocast(cls, enabled: bool, fp8_recipe: int | None) -> Iterator[None]:
        before, cls.levels = cls.levels, fp8_recipe if enabled else None
        try:
            yield
        finally:
            cls.levels = before

    @classmethod
    def of(cls, value: Any) -> Any:
        if cls.levels is None:
            return value
        return value + ((value * cls.levels).round() / cls.levels - value).detach()


@contextlib.contextmanager
def transformer_engine() -> Iterator[None]:
    """Let quantized recomputation run without a GPU, Transformer Engine and a compiler."""
    from megatron.core.tensor_parallel import random

    state = SimpleNamespace(
        is_fp8_enabled=lambda: Rounding.levels is not None,
        get_fp8_recipe=lambda: Rounding.levels,
    )
    names = {
        "_get_cuda_rng_state": lambda **_: None,
        "_set_cuda_rng_state": lambda *_, **__: None,
        "_get_share_storage": lambda: share,
        "FP8GlobalStateManager": state,
        "fp8_autocast": Rounding.autocast,
        "activation_recompute_forward": lambda **_: contextlib.nullcontext(),
    }
    with mock.patch.multiple(random, create=True, **names):
        yield
