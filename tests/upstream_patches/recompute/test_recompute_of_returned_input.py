"""A layer whose norms also return their input, with and without recomputation of the norms."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from cppmega.catalogue import loader as catalogue
from tests.support import VERSIONS, pristine, python
from tests.upstream_patches import one_process
from tests.upstream_patches.recomputation import share

torch = pytest.importorskip("torch")

PAGE = "recompute_of_returned_input"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_recompute_changes_nothing(version: str) -> None:
    one_process.assert_passes(PAGE, version)


@pytest.mark.megatron
def test_stock_reads_what_it_freed() -> None:
    module = f"tests.upstream_patches.recompute.test_{PAGE}"
    code = f"import {module} as test\ntest.trained(['layernorm'])"
    done = python(pristine(VERSIONS[-1]), code)
    assert done.returncode == -signal.SIGSEGV, (done.returncode, done.stderr)


def test_which_runs_must_reach_it() -> None:
    when = catalogue.load()[PAGE].patch.when
    run = {
        "fused_residual_rmsnorm": True,
        "transformer_impl": "transformer_engine",
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "layernorm"],
        "num_experts": 8,
    }
    assert when is not None and when(SimpleNamespace(**run))
    assert when(SimpleNamespace(**(run | {"num_experts": None, "multi_latent_attention": True})))
    for other in (
        {"fused_residual_rmsnorm": False},
        {"transformer_impl": "local"},
        {"recompute_granularity": "full", "recompute_modules": None},
        {"recompute_modules": ["core_attn"]},
        {"num_experts": None},
        {"cuda_graph_impl": "transformer_engine"},
        {"hybrid_layer_pattern": "M*ME"},
    ):
        assert not when(SimpleNamespace(**(run | other))), other


def check(stock: one_process.Stock) -> None:
    from megatron.core.tensor_parallel import random

    plain = trained(None)
    for ours, theirs in zip(trained(["layernorm"]), plain, strict=True):
        assert torch.equal(ours, theirs)
    unpatched = stock.module("megatron.core.tensor_parallel.random")
    for module, kept in ((random, True), (unpatched, False)):
        assert kept_after_discard(module) == [False, kept, kept]


def kept_after_discard(module: Any) -> list[bool]:
    """Whether memory is kept for a new output, a returned input, and a view of it."""
    with on_cpu(module):
        hidden = torch.ones(2, 4, requires_grad=True) * 1.0
        checkpoint = module.CheckpointWithoutOutput()
        outputs = checkpoint.checkpoint(lambda x: (x.sin(), x, x[:1]), hidden)
        checkpoint.discard_output_and_register_recompute(outputs[0].detach())
    return [bool(output.untyped_storage().nbytes()) for output in outputs]


def trained(recompute: list[str] | None) -> list[Any]:
    """Return output and gradients of two layers in which every norm returns the residual."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        recompute_granularity="selective" if recompute else None,
        recompute_modules=recompute,
    )
    parts = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm_with_residual()
    with on_cpu(random):
        torch.manual_seed(0)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        layers = [TransformerLayer(config, parts, n, pg_collection=groups) for n in (1, 2)]
        given = torch.randn(6, 1, 8, requires_grad=True)
        hidden = given * 1.0
        for layer in layers:
            hidden, _ = layer(hidden, attention_mask=torch.ones(1, 1, 6, 6).triu(1).bool())
        hidden.square().sum().backward()
    weights = [weight.grad for layer in layers for weight in layer.parameters()]
    assert len(weights) == 2 * 6
    return [hidden.detach(), given.grad, *weights]


def norm_with_residual() -> type:
    """Return the norm and the input itself, as Transformer Engine's operations do."""

    class Norm(torch.nn.RMSNorm):
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__(hidden_size, eps=eps)

        def forward(self, hidden: Any) -> Any:
            return super().forward(hidden), hidden

    return Norm


@contextlib.contextmanager
def on_cpu(random: Any) -> Iterator[None]:
    """Let recomputation run without a GPU, Transformer Engine and a compiler."""
    original = random.CheckpointWithoutOutput.__init__

    def unquantized(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.fp8 = False  # the default is False, which these releases take for a recipe

    with (
        mock.patch.multiple(
            random,
            _get_cuda_rng_state=lambda **_: None,
            _set_cuda_rng_state=lambda *_, **__: None,
            _get_share_storage=lambda: share,
        ),
        mock.patch.object(random.CheckpointWithoutOutput, "__init__", unquantized),
    ):
        yield
