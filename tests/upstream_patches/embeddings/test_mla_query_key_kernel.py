"""The kernels' reference is stock's heads to the bit, and patched code calls the kernels.

`tests/ops/pointwise/test_mla_heads.py` compares the kernels with their reference.
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest

from cppmega.proof.stand_ins import Arguments
from tests.support import laws
from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "mla_query_key_kernel"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, True),
        ({"multi_latent_attention": False}, False),
        ({"apply_rope_fusion": True}, False),
        ({"rotary_interleaved": True}, False),
        ({"experimental_attention_variant": "dsa"}, False),
        ({"hybrid_layer_pattern": "M+M-"}, True),
        ({"hybrid_layer_pattern": "DM+"}, True),
        ({"hybrid_layer_pattern": "DM-"}, False),
    ],
)
def test_runs_that_pass_through_it(given: dict[str, Any], wanted: bool) -> None:
    when = laws.pages()[PAGE].patch.when
    assert when is not None
    assert when(Arguments(**({"multi_latent_attention": True} | given))) is wanted


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_heads(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention as patched

    from cppmega.ops.pointwise import mla_heads, rope
    from cppmega.ops.pointwise import mla_heads_naive as mla_heads_reference
    from cppmega.ops.pointwise import rope_naive as rope_reference
    from cppmega.proof import small_models

    unpatched = stock.module("megatron.core.transformer.multi_latent_attention")
    without_cuda = {"_get_cuda_rng_state": mock.DEFAULT, "_set_cuda_rng_state": mock.DEFAULT}
    for latent, recomputed, dtype in itertools.product(
        (16, None), (False, True), (torch.bfloat16, torch.float32)
    ):
        options: dict[str, Any] = {"q_lora_rank": latent}
        if recomputed:
            options |= {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
        layer = small_models.mla_attention(**options).to(dtype)

        with mock.patch.multiple(random, **without_cuda):
            wanted = outcome(unpatched, layer)
            with (
                one_process.by_reference(rope, "rotated", rope_reference.rotated),
                one_process.by_reference(
                    mla_heads, "query_key_value", mla_heads_reference.query_key_value
                ) as kernels,
            ):
                found = outcome(patched, layer)
            assert kernels.call_count == 1 + recomputed
            on_cpu = outcome(patched, layer)
            assert kernels.call_count == 1 + recomputed
        for mine, expected in zip((*found, *on_cpu), (*wanted, *wanted), strict=True):
            assert torch.equal(mine, expected), (latent, recomputed, dtype)


def outcome(module: Any, layer: Any) -> list[Any]:
    """Query, key and value of a module's MLA, and the gradients of its input and weights."""
    drawn = torch.Generator().manual_seed(1)
    kind = next(layer.parameters()).dtype
    x = torch.randn(5, 2, 32, generator=drawn).to(kind).requires_grad_()
    layer.zero_grad()
    out = module.MLASelfAttention.get_query_key_value_tensors(layer, x)[:3]
    results = [each.detach().clone() for each in out]
    upstream = [torch.randn(each.shape, generator=drawn).to(kind) for each in out]
    # Products keep the three, as a core attention does; their memory is released before backward.
    loss = sum((each * each * given).sum() for each, given in zip(out, upstream, strict=True))
    if layer.recompute_up_proj:
        layer.qkv_up_checkpoint.discard_output_and_register_recompute(loss)
    loss.backward()
    weights = [weight.grad for weight in layer.parameters() if weight.grad is not None]
    return [*results, x.grad, *weights]
