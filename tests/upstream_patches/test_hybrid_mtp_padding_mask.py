"""The routers in the MTP depths of a hybrid model do not count padding."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "hybrid_mtp_padding_mask"
DEPTHS = 2


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_hybrid_model(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.models.hybrid import hybrid_model as patched

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    unpatched = stock.module("megatron.core.models.hybrid.hybrid_model")

    padding = torch.zeros(2, 8, dtype=torch.bool)
    padding[:, 4:] = True
    # Depth d sees the tokens d places on. The last d places have none, which does not mask them.
    assert counted(patched, padding) == [8, 8 - 2 + 2, 8 - 4 + 4]
    assert counted(unpatched, padding) == [8, 16, 16]
    for module in (patched, unpatched):
        assert counted(module, None) == [16, 16, 16]
    assert torch.equal(losses(patched, None), losses(unpatched, None))


def counted(module: Any, padding: Any) -> list[float]:
    """Return the tokens that each router counted: the decoder first, then the MTP depths."""
    model = build(module)
    losses(module, padding, model)
    routers = [part for name, part in model.named_modules() if name.endswith("router")]
    return [router.local_tokens_per_expert.sum().item() / 2 for router in routers]


def losses(module: Any, padding: Any, model: Any = None) -> Any:
    tokens = torch.arange(16).view(2, 8)
    with torch.compiler.set_stance("force_eager"):
        return (model or build(module))(
            tokens, tokens % 8, None, labels=tokens, padding_mask=padding
        ).detach()


def build(module: Any, **options: Any) -> Any:
    """Build a model with only MoE layers, which need no GPU kernel.

    Args:
        module: Megatron's `hybrid_model`.
        options: fields of the configuration.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    config = TransformerConfig(
        num_layers=1,
        mtp_num_layers=DEPTHS,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-4,
        moe_token_dispatcher_type="allgather",
        add_bias_linear=False,
        use_cpu_initialization=True,
        **options,
    )
    moe = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    depth = ModuleSpec(
        module=mtp.MultiTokenPredictionLayer,
        submodules=mtp.MultiTokenPredictionLayerSubmodules(
            enorm=WrappedTorchNorm,
            hnorm=WrappedTorchNorm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=None,
            layer_norm=WrappedTorchNorm,
        ),
    )
    stack = ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            moe_layer=moe,
            mtp_block_spec=ModuleSpec(
                module=mtp.MultiTokenPredictionBlock,
                submodules=mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[depth]),
            ),
        ),
    )
    torch.manual_seed(6)
    with mock.patch.object(hybrid_block, "TENorm", WrappedTorchNorm):
        return module.HybridModel(
            config,
            hybrid_stack_spec=stack,
            vocab_size=32,
            max_sequence_length=8,
            hybrid_layer_pattern="E" + "/E" * DEPTHS,
            position_embedding_type="none",
        )
