"""Small models of the tree's own classes, with everything that a configuration asks of them.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from tests.configurations.batches import LENGTH, VOCABULARY
from tests.configurations.settings import Configuration
from tests.configurations.stand_ins import Norm

LAYERS = ["M", "*-"]
"""Of a hybrid model, by pipeline stage; a GPT has one layer in each."""
MTP = "*-"


def build(setting: Configuration, seed: int) -> tuple[Any, Any]:
    """The configuration's own config and this rank's part of its model."""
    config, (model,) = build_stages(setting, seed)
    return config, model


def build_stages(setting: Configuration, seed: int) -> tuple[Any, list[Any]]:
    """The configuration's own config and the virtual stages of this rank."""
    torch.manual_seed(seed)
    config = configured(setting)
    stages = []
    for number in range(setting.virtual):
        virtual = {"vp_stage": number} if setting.virtual > 1 else {}
        place = {"ignore_virtual": False, **virtual} if virtual else {}
        given = {
            "config": config,
            "vocab_size": VOCABULARY,
            "max_sequence_length": LENGTH,
            "pre_process": parallel_state.is_pipeline_first_stage(**place),
            "post_process": parallel_state.is_pipeline_last_stage(**place),
            "share_embeddings_and_output_weights": setting.tied,
            **virtual,
        }
        model = (_gpt if setting.model == "gpt" else _hybrid)(setting, given)
        stages.append(Float16Module(config, model) if config.bf16 else model)
    return config, stages


def configured(setting: Configuration) -> TransformerConfig:
    """Megatron's configuration for the settings."""
    bf16 = setting.optimizer != "float32"
    dtype = torch.bfloat16 if bf16 else torch.float32
    return TransformerConfig(
        num_layers=setting.virtual * len("".join(LAYERS) if setting.model == "hybrid" else LAYERS),
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        mamba_num_heads=4,
        mamba_head_dim=8,
        mamba_state_dim=4,
        mamba_num_groups=2,
        is_hybrid_model=setting.model == "hybrid",
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.1,
        attention_dropout=0.0,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=setting.tensor,
        sequence_parallel=setting.sequence_parallel,
        context_parallel_size=setting.context,
        pipeline_model_parallel_size=setting.pipeline,
        virtual_pipeline_model_parallel_size=setting.virtual if setting.virtual > 1 else None,
        mtp_num_layers=setting.mtp or None,
        mtp_loss_scaling_factor=0.3,
        variable_seq_lengths=False,
        gradient_accumulation_fusion=setting.gradients == "fused",
        **_recompute(setting),
        **_loss(setting),
    )


def _recompute(setting: Configuration) -> dict[str, Any]:
    if setting.recompute == "none":
        return {}
    if setting.recompute == "selective":
        return {"recompute_granularity": "selective"}
    return {
        "recompute_granularity": "full",
        "recompute_method": setting.recompute,
        "recompute_num_layers": 1,
    }


def _loss(setting: Configuration) -> dict[str, Any]:
    if setting.loss == "unfused":
        return {}
    return {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": setting.loss}


def _gpt(setting: Configuration, given: dict[str, Any]) -> Any:
    layer = gpt_layer_specs.get_gpt_layer_local_spec()
    heads = None
    if setting.mtp:
        heads = gpt_layer_specs.get_gpt_mtp_block_spec(
            given["config"], layer, use_transformer_engine=False
        )
    return GPTModel(
        transformer_layer_spec=layer,
        position_embedding_type="rope" if setting.position == "rope" else "learned_absolute",
        mtp_block_spec=heads,
        **given,
    )


def _hybrid(setting: Configuration, given: dict[str, Any]) -> Any:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    stages = ("|" if setting.pipeline == 2 else "").join(LAYERS * setting.virtual)
    return HybridModel(
        hybrid_stack_spec=_stack(),
        hybrid_layer_pattern="/".join([stages, *[MTP] * setting.mtp]),
        position_embedding_type="rope" if setting.position == "rope" else "none",
        **given,
    )


def _stack() -> ModuleSpec:
    """The layers of a hybrid stack; Megatron's own spec names Transformer Engine's."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )

    local = gpt_layer_specs.get_gpt_layer_local_spec().submodules
    mixer = ModuleSpec(
        MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    )
    mamba = MambaLayerSubmodules(norm=Norm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    attention = TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=local.self_attention,
        self_attn_bda=get_bias_dropout_add,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=Norm, mlp=local.mlp, mlp_bda=get_bias_dropout_add
    )
    head = MultiTokenPredictionLayerSubmodules(
        enorm=Norm,
        hnorm=Norm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,
        layer_norm=Norm,
    )
    heads = MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(MultiTokenPredictionLayer, submodules=head)]
    )
    return ModuleSpec(
        HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
            mtp_block_spec=ModuleSpec(MultiTokenPredictionBlock, submodules=heads),
        ),
    )
