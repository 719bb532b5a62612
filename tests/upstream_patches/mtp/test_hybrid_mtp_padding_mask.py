"""The routers in the MTP depths of a hybrid model do not count padding."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.support import patched, pristine, python
from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "hybrid_mtp_padding_mask"
DEPTHS = 2


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_hybrid_model(version: str) -> None:
    one_process.assert_passes(PAGE, version)


@pytest.mark.megatron
def test_sequence_parallelism() -> None:
    code = f"""
    from pathlib import Path
    from tests.upstream_patches import one_process
    from tests.upstream_patches.mtp import test_hybrid_mtp_padding_mask as test
    test.check_ranks(one_process.Stock(Path({str(pristine("0.19.2"))!r})))
    """
    done = python(patched("0.19.2", PAGE, "moe_expert_bias_padding_mask"), code, nproc=2)
    assert done.returncode == 0, done.stderr


def check_ranks(stock: one_process.Stock) -> None:
    """A dense decoder ignores the mask of all tokens, and each rank's routers get its part."""
    from megatron.core.models.hybrid import hybrid_model as patched

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed(tensor=2)
    unpatched = stock.module("megatron.core.models.hybrid.hybrid_model")
    options = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    padding = torch.zeros(2, 8, dtype=torch.bool)
    padding[:, 5:] = True
    for module, wanted in ((patched, [10.0, 10.0]), (unpatched, [16.0, 16.0])):
        model = build(module, "-", **options)
        losses(module, padding, model).sum().backward()
        counts = torch.tensor(counted_by(model))
        torch.distributed.all_reduce(counts)
        assert counts.tolist() == wanted
    # The caller may have divided it: this rank has the tokens 0 to 3 or 4 to 7 of each sequence.
    model = build(patched, "-", **options)
    losses(patched, padding.chunk(2, 1)[torch.distributed.get_rank()], model)
    counts = torch.tensor(counted_by(model))
    torch.distributed.all_reduce(counts)
    assert counts.tolist() == [10.0, 12.0]  # the second roll does not reach the rank before


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
    return counted_by(model)


def counted_by(model: Any) -> list[float]:
    routers = [part for name, part in model.named_modules() if name.endswith("router")]
    return [router.local_tokens_per_expert.sum().item() / 2 for router in routers]


def losses(module: Any, padding: Any, model: Any = None) -> Any:
    tokens = torch.arange(16).view(2, 8)
    with torch.compiler.set_stance("force_eager"):
        return (model or build(module))(
            tokens, tokens % 8, None, labels=tokens, padding_mask=padding
        )


def build(module: Any, trunk: str = "E", **options: Any) -> Any:
    """Build a model with MoE layers, which need no GPU kernel.

    Args:
        module: Megatron's `hybrid_model`.
        trunk: the layers before the MTP depths: MoE (`E`) or dense (`-`).
        options: fields of the configuration.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    from tests.configurations.stand_ins import Norm

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
            pre_mlp_layernorm=Norm,
            mlp=get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=Norm,
        mlp=get_gpt_layer_local_spec().submodules.mlp,
        mlp_bda=get_bias_dropout_add,
    )
    depth = ModuleSpec(
        module=mtp.MultiTokenPredictionLayer,
        submodules=mtp.MultiTokenPredictionLayerSubmodules(
            enorm=Norm,
            hnorm=Norm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=None,
            layer_norm=Norm,
        ),
    )
    stack = ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            moe_layer=moe,
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
            mtp_block_spec=ModuleSpec(
                module=mtp.MultiTokenPredictionBlock,
                submodules=mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[depth]),
            ),
        ),
    )
    torch.manual_seed(6)
    with mock.patch.object(hybrid_block, "TENorm", Norm):
        return module.HybridModel(
            config,
            hybrid_stack_spec=stack,
            vocab_size=32,
            max_sequence_length=8,
            hybrid_layer_pattern=trunk + "/E" * DEPTHS,
            position_embedding_type="none",
        )
