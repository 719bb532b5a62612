"""Small models of the tree's own classes, with everything that a configuration asks of them.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
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

LAYERS, UNEVEN = ["M", "*-"], ["M*-", "M"]
"""Of a hybrid model, by pipeline stage; a GPT has one layer in each, or two in an uneven second."""
MTP = "*-"
EXPERTS = 4
FROZEN = ("self_attention", "output_layer")


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
        if setting.frozen:
            _freeze(setting, model)
        stages.append(Float16Module(config, model) if config.bf16 or config.fp16 else model)
    return config, stages


def _freeze(setting: Configuration, model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        is_tied = setting.tied and "output_layer" in name
        if any(part in name for part in FROZEN) and not is_tied:
            parameter.requires_grad_(False)


def configured(setting: Configuration) -> TransformerConfig:
    """Megatron's configuration for the settings."""
    dtype = {"float32": torch.float32, "scaled": torch.float16}.get(
        setting.optimizer, torch.bfloat16
    )
    return TransformerConfig(
        num_layers=setting.virtual * sum(_layers(setting)),
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
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
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
        **_experts(setting),
        **_layout(setting),
    )


def _layers(setting: Configuration) -> list[int]:
    """The number of layers in each pipeline stage."""
    if setting.model == "hybrid":
        return [len(layers) for layers in (UNEVEN if setting.uneven else LAYERS)]
    return [1, 2] if setting.uneven else [1, 1]


def _layout(setting: Configuration) -> dict[str, Any]:
    """Where a GPT's layers are; a hybrid model's pattern says it."""
    if not setting.uneven or setting.model == "hybrid":
        return {}
    stages = [["decoder"] * n for n in _layers(setting) * setting.virtual]
    stages[0].insert(0, "embedding")
    stages[-1] += ["mtp"] * setting.mtp + ["loss"]
    return {"pipeline_model_parallel_layout": stages}


def _experts(setting: Configuration) -> dict[str, Any]:
    if setting.experts == "none":
        return {}
    return {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": not setting.padding_mask,  # with both, stock dies
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_token_dispatcher_type": "allgather",
        "add_bias_linear": False,
        "expert_model_parallel_size": setting.expert,
        "expert_tensor_parallel_size": setting.expert_tensor,
    }


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
    experts = {} if setting.experts == "none" else {"num_experts": EXPERTS}
    layer = gpt_layer_specs.get_gpt_layer_local_spec(**experts)
    heads = None
    if setting.mtp:
        place = {"vp_stage": given["vp_stage"]} if setting.virtual > 1 else {}
        heads = gpt_layer_specs.get_gpt_mtp_block_spec(
            given["config"], layer, use_transformer_engine=False, **place
        )
    return GPTModel(
        transformer_layer_spec=layer,
        position_embedding_type="rope" if setting.position == "rope" else "learned_absolute",
        mtp_block_spec=heads,
        **given,
    )


def _hybrid(setting: Configuration, given: dict[str, Any]) -> Any:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    layers = (UNEVEN if setting.uneven else LAYERS) * setting.virtual
    stages, heads = ("|" if setting.pipeline == 2 else "").join(layers), MTP
    if setting.experts != "none":
        heads = MTP.replace("-", "E")
        if not (setting.padding_mask and setting.sequence_parallel):  # else stock's stack dies
            stages = stages.replace("-", "E")
    return HybridModel(
        hybrid_stack_spec=_stack(),
        hybrid_layer_pattern="/".join([stages, *[heads] * setting.mtp]),
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
    moe = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    experts = replace(mlp, mlp=moe)
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
            moe_layer=ModuleSpec(TransformerLayer, submodules=experts),
            mtp_block_spec=ModuleSpec(MultiTokenPredictionBlock, submodules=heads),
        ),
    )
