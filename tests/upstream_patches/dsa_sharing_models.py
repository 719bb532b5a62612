"""Small models on the CPU whose layers are DSA and MLP: a GPT of any version, a hybrid since 0.18.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from cppmega.proof import cpu_shims
from cppmega.proof.small_models import Norm, Projection, arguments

LENGTH, BATCH, WORDS = 12, 2, 32
NEW = hasattr(dsa, "dsa_kernels")  # 0.19


def start(**parallel: int) -> None:
    """Replace what these layers need from a GPU."""
    cpu_shims.init_distributed(**parallel)
    mock.patch.object(dsa, "rotate_activation", lambda x: x).start()
    mock.patch.object(random, "_get_cuda_rng_state", lambda *device, **named: None).start()
    mock.patch.object(random, "_set_cuda_rng_state", lambda *state, **named: None).start()
    multi_latent_attention.HAVE_TE = False  # 0.16 takes its own stand-ins for it


def config(**options: Any) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return MLATransformerConfig(
        **{
            **{"hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 32},
            **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8},
            **{"v_head_dim": 16, "add_bias_linear": False, "use_cpu_initialization": True},
            **{"experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 2},
            **{"dsa_indexer_head_dim": 32, "dsa_indexer_topk": 3, "dsa_indexer_loss_coeff": 0.5},
            **{"rope_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0},
            **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_dropout_fusion": False},
        }
        | options
    )


class _Backend(LocalSpecProvider):
    def linear(self) -> type:
        return ColumnParallelLinear


def _attention(settings: Any) -> Any:
    spec = variants.get_dsa_module_spec_for_backend(settings, _Backend())
    indexer = spec.submodules.core_attention.submodules.indexer
    indexer.submodules = dsa.DSAIndexerSubmodules(Projection, Projection, Norm, Projection)
    return spec


def _layer(settings: Any, mlp: bool, attention: bool = True) -> ModuleSpec:
    whole = gpt_layer_specs.get_gpt_layer_local_spec().submodules
    parts: dict[str, Any] = {}
    if attention:
        parts |= {"input_layernorm": whole.input_layernorm, "self_attn_bda": whole.self_attn_bda}
        parts["self_attention"] = _attention(settings)
    if mlp:
        parts |= {"pre_mlp_layernorm": whole.pre_mlp_layernorm, "mlp": whole.mlp}
        parts["mlp_bda"] = whole.mlp_bda
    return ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(**parts))


def gpt(layers: int, here: int | None = None, stages: dict[str, Any] | None = None, **options: Any):
    """A GPT, or the stage of one with `here` of its layers."""
    settings = config(num_layers=layers, **options)
    spec = _layer(settings, mlp=True)
    norm = gpt_layer_specs.get_gpt_layer_local_spec().submodules.input_layernorm
    submodules = TransformerBlockSubmodules([copy.deepcopy(spec)] * (here or layers), norm)
    torch.manual_seed(0)
    return GPTModel(
        config=settings,
        transformer_layer_spec=submodules,
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        position_embedding_type="none",
        **(stages or {}),
    )


def hybrid(pattern: str, stages: dict[str, Any] | None = None, **options: Any) -> Any:
    """A hybrid model of the letters D and -, with MTP depths after a /."""
    from megatron.core.models.hybrid import hybrid_block as block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import multi_token_prediction as mtp

    main, *depths = pattern.split("/")
    settings = config(
        num_layers=len(main.replace("|", "")),
        mtp_num_layers=len(depths) or None,
        is_hybrid_model=True,
        **options,
    )
    head = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=WrappedNorm,
        hnorm=WrappedNorm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,
        layer_norm=WrappedNorm,
    )
    heads = mtp.MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(mtp.MultiTokenPredictionLayer, submodules=head)]
    )
    parts = block.HybridStackSubmodules(
        dsa_layer=_layer(settings, mlp=False),
        mlp_layer=_layer(settings, mlp=True, attention=False),
        mtp_block_spec=ModuleSpec(mtp.MultiTokenPredictionBlock, submodules=heads),
    )
    torch.manual_seed(0)
    with mock.patch.object(block, "TENorm", WrappedNorm):
        return HybridModel(
            config=settings,
            hybrid_stack_spec=ModuleSpec(block.HybridStack, submodules=parts),
            hybrid_layer_pattern=pattern,
            vocab_size=WORDS,
            max_sequence_length=LENGTH,
            position_embedding_type="none",
            **(stages or {}),
        )


class WrappedNorm(torch.nn.LayerNorm):
    """A norm with the arguments of any version."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **ignored: Any) -> None:
        super().__init__(hidden_size, eps)


def batch(seed: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(
        WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    return {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(LENGTH).expand(BATCH, LENGTH),
        "attention_mask": None,
        "loss_mask": torch.ones(BATCH, LENGTH),
    }


def attentions(model: Any) -> dict[str, Any]:
    """The DSA layers of a model by name."""
    found = model.named_modules()
    return {name: module for name, module in found if isinstance(module, dsa.DSAttention)}


def loss(model: Any, seed: int = 1) -> Any:
    return model(**arguments(model, **batch(seed))).mean()
