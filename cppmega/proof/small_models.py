"""Small Megatron models for proofs and tests on a CPU.

Example:
    >>> model = small_models.gpt(num_moe_experts=4)
    >>> loss = model(**small_models.arguments(model))
"""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import torch

from cppmega.proof import cpu_shims

S, B, H, V = 8, 2, 8, 48
"""Sequence length, batch size, hidden size and vocabulary size."""


def config(**options: Any) -> Any:
    """A TransformerConfig with one layer and without dropout, for a model on CPU."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = {
        "num_layers": 1,
        "hidden_size": H,
        "ffn_hidden_size": H,
        "num_attention_heads": 2,
        "use_cpu_initialization": True,
        "bias_dropout_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    } | options
    return TransformerConfig(**options)


def gpt(mtp: int | None = None, tied: bool = False, **options: Any) -> Any:
    """A GPTModel with one layer.

    Args:
        mtp: the number of MTP depths.
        tied: whether embeddings and output layer share their weights.
        options: fields of the configuration.
    """
    cpu_shims.init_distributed()
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    settings = config(mtp_num_layers=mtp, **options)
    # On dev, the layers of a model with several residual streams are of a class of their own.
    streams = {"enable_hyper_connection": True} if options.get("enable_hyper_connections") else {}
    layer = gpt_layer_specs.get_gpt_layer_local_spec(**streams)
    depths = {}
    if mtp:
        depths["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
            settings, layer, use_transformer_engine=False
        )
    torch.manual_seed(0)
    return GPTModel(
        config=settings,
        transformer_layer_spec=layer,
        vocab_size=V,
        max_sequence_length=S,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=tied,
        **depths,
    )


def hybrid(tied: bool = False, pattern: str = "*-", **options: Any) -> Any:
    """A hybrid model, by default with an attention and an MLP layer; MambaModel before 0.18.

    Args:
        tied: whether embeddings and output layer share their weights.
        pattern: of layers `*`, `-` and `M`.
        options: fields of the configuration.
    """
    cpu_shims.init_distributed()
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    try:
        from megatron.core.models.hybrid import hybrid_block as block
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Model

        stack, submodules = block.HybridStack, block.HybridStackSubmodules
        named, spec = "hybrid_layer_pattern", "hybrid_stack_spec"
    except ImportError:
        from megatron.core.models.mamba.mamba_model import MambaModel as Model
        from megatron.core.ssm import mamba_block as block

        stack, submodules = block.MambaStack, block.MambaStackSubmodules
        named, spec = "hybrid_override_pattern", "mamba_stack_spec"
        if "hybrid_layer_pattern" in inspect.signature(Model).parameters:
            named = "hybrid_layer_pattern"
    full = gpt_layer_specs.get_gpt_layer_local_spec().submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=full.input_layernorm,
        self_attention=full.self_attention,
        self_attn_bda=full.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=full.pre_mlp_layernorm, mlp=full.mlp, mlp_bda=full.mlp_bda
    )
    mamba = MambaLayerSubmodules(
        norm=full.input_layernorm,
        mixer=ModuleSpec(
            module=MambaMixer,
            submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear),
        ),
        mamba_bda=full.self_attn_bda,
    )
    layers = submodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=TransformerLayer, submodules=mlp),
    )
    torch.manual_seed(0)
    with mock.patch.object(block, "TENorm", WrappedTorchNorm):  # TransformerEngine's
        return Model(
            config=config(num_layers=len(pattern), **options),
            vocab_size=V,
            max_sequence_length=S,
            position_embedding_type="none",
            share_embeddings_and_output_weights=tied,
            **{named: pattern, spec: ModuleSpec(module=stack, submodules=layers)},
        )


class Projection(torch.nn.Linear):
    """A linear layer that is built and called like Megatron's."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, **ignored: Any) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the product, and no bias."""
        return super().forward(x), None


class Norm(torch.nn.LayerNorm):
    """A layer norm that is built like Megatron's."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        fp32 = getattr(config, "dsa_indexer_k_norm_fp32", False)
        super().__init__(hidden_size, eps, dtype=torch.float32 if fp32 else config.params_dtype)


def dsa_config(**options: Any) -> Any:
    """A configuration of DSA layers in bf16 whose indexers have 4 heads of 32."""
    cpu_shims.init_distributed()
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    options = {
        **{"num_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "q_lora_rank": 32},
        **{"kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16},
        **{"add_bias_linear": False, "bf16": True, "params_dtype": torch.bfloat16},
        **{"rope_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0},
        **{"apply_rope_fusion": False, "experimental_attention_variant": "dsa"},
        **{"dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 32, "dsa_indexer_topk": 8},
    } | options
    return MLATransformerConfig(**options)


def dsa_indexer(dsa: Any = None, **options: Any) -> Any:
    """A DSAIndexer with `dsa_config`; 8 of the 32 columns of each head are rotated.

    Args:
        dsa: the module that has the class; None: the tree's module.
        options: fields of the configuration.
    """
    settings = dsa_config(**options)
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.experimental_attention_variant import dsa as installed

    torch.manual_seed(0)
    return (dsa or installed).DSAIndexer(
        settings,
        installed.DSAIndexerSubmodules(Projection, Projection, Norm, Projection),
        ProcessGroupCollection.use_mpu_process_groups(),
    )


def dsa_attention(**options: Any) -> Any:
    """The absorbed MLA of a DSA layer (0.19): 16 heads, latents with parts of width 16 and 8.

    Its process groups are those that the caller has initialized, or those of a single process.

    Args:
        options: fields of the configuration.
    """
    cpu_shims.init_distributed()
    from megatron.core import tensor_parallel as tp
    from megatron.core.transformer import identity_op
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    options = {
        **{"num_layers": 1, "hidden_size": 32, "num_attention_heads": 16, "q_lora_rank": 16},
        **{"kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16},
        **{"add_bias_linear": False, "use_cpu_initialization": True, "rope_type": "rope"},
        **{"experimental_attention_variant": "dsa", "dsa_indexer_rotate_activation": False},
        **{"dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": 32, "dsa_indexer_topk": 6},
    } | options
    indexer = ModuleSpec(
        dsa.DSAIndexer,
        submodules=dsa.DSAIndexerSubmodules(Projection, Projection, Norm, Projection),
    )
    columns, norm = tp.ColumnParallelLinear, identity_op.IdentityOp
    parts = absorbed_mla.AbsorbedMLASelfAttentionSubmodules(
        **dict.fromkeys(("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"), columns),
        **dict.fromkeys(("linear_kv_down_proj", "linear_kv_up_proj"), columns),
        core_attention=ModuleSpec(
            dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer=indexer)
        ),
        linear_proj=tp.RowParallelLinear,
        q_layernorm=norm,
        kv_layernorm=norm,
    )
    torch.manual_seed(0)
    return absorbed_mla.AbsorbedMLASelfAttention(
        MLATransformerConfig(**options),
        parts,
        1,
        attn_mask_type=AttnMaskType.causal,
        cp_comm_type=options.get("cp_comm_type"),
    )


def mla_attention(**options: Any) -> Any:
    """The MLA of a layer with full attention: 4 heads, with parts of width 16, 8 and 12.

    Its core attention is the identity.

    Args:
        options: fields of the configuration.
    """
    cpu_shims.init_distributed()
    from megatron.core import tensor_parallel as tp
    from megatron.core.transformer import identity_op
    from megatron.core.transformer import multi_latent_attention as mla
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    options = {
        **{"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "q_lora_rank": 16},
        **{"kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12},
        **{"add_bias_linear": False, "use_cpu_initialization": True, "rope_type": "rope"},
    } | options
    columns, unchanged = tp.ColumnParallelLinear, identity_op.IdentityOp
    parts = mla.MLASelfAttentionSubmodules(
        **dict.fromkeys(("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"), columns),
        **dict.fromkeys(("linear_kv_down_proj", "linear_kv_up_proj"), columns),
        **dict.fromkeys(("core_attention", "q_layernorm", "kv_layernorm"), unchanged),
        linear_proj=tp.RowParallelLinear,
    )
    torch.manual_seed(0)
    with mock.patch.object(mla, "HAVE_TE", False):  # without the package, 0.16 has mocks of classes
        return mla.MLASelfAttention(
            MLATransformerConfig(**options), parts, 1, attn_mask_type=AttnMaskType.causal
        )


def dsa_index_inputs(indexer: Any, hidden: Any, latent: Any, packed: Any = None) -> Any:
    """The queries, keys and head weights of a DSAIndexer's scores, in any release."""
    if hasattr(indexer, "forward_before_topk"):
        return indexer.forward_before_topk(hidden, latent, packed)
    with mock.patch.object(
        indexer, "_compute_index_scores", side_effect=lambda q, w, k: torch.zeros(1, len(q), len(q))
    ) as scores:
        indexer.forward_with_scores(hidden, latent)
    q, weights, k = scores.call_args.args
    return q, k, weights


def arguments(model: Any, **given: Any) -> dict[str, Any]:
    """A batch for a model, without what its `forward` does not take (0.16: the loss mask).

    Args:
        given: replaces entries of the batch.
    """
    accepted = inspect.signature(model.forward).parameters
    return {name: value for name, value in {**batch(), **given}.items() if name in accepted}


def batch() -> dict[str, Any]:
    """Tokens, labels, masks and positions of `B` sequences of `S` tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(V, (B, S + 1), generator=generator)
    mask = (torch.rand(B, S, generator=generator) > 0.3).float()
    attention = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
    return {
        "input_ids": tokens[:, :-1],
        "position_ids": torch.arange(S).expand(B, S),
        "attention_mask": attention,
        "labels": tokens[:, 1:],
        "loss_mask": mask,
    }
