"""A real router with an expert bias and a padding mask counts the tokens that are not padding."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "moe_expert_bias_padding_mask"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_router(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.transformer.moe import router as patched

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    unpatched = stock.module("megatron.core.transformer.moe.router")
    for experts, tokens, batch in ((8, 5, 2), (4, 2, 2), (4, 6, 1)):
        given = torch.randn(tokens, batch, 16, generator=torch.Generator().manual_seed(4))
        padding = torch.zeros(tokens, batch, dtype=torch.bool)
        padding[-2:, 0] = True

        load, probs, routing_map = outcome(patched, experts, given, padding)
        assert torch.equal(load, routing_map[~padding.view(-1)].sum(0).float())
        assert load.sum() == 2 * (~padding).sum()

        stock_load, stock_probs, stock_map = outcome(unpatched, experts, given, None)
        assert torch.equal(routing_map, stock_map) and torch.equal(probs, stock_probs)
        assert torch.equal(outcome(patched, experts, given, None)[0], stock_load)
        if tokens * batch == experts:  # broadcast over the wrong axis, unseen
            assert not torch.equal(outcome(unpatched, experts, given, padding)[0], load)
        else:
            with pytest.raises(RuntimeError, match="must match the size"):
                outcome(unpatched, experts, given, padding)


def outcome(module: Any, experts: int, given: Any, padding: Any) -> tuple[Any, Any, Any]:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=experts,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-4,
        use_cpu_initialization=True,
        perform_initialization=True,
        add_bias_linear=False,
    )
    torch.manual_seed(5)
    router = module.TopKRouter(
        config, pg_collection=ProcessGroupCollection.use_mpu_process_groups()
    )
    router.set_layer_number(1)
    # 0.16 does not define the name where Transformer Engine is missing.
    gemm = mock.patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True)
    with torch.compiler.set_stance("force_eager"), gemm:
        probs, routing_map = router(given, padding_mask=padding)
    return router.local_tokens_per_expert, probs.detach(), routing_map
