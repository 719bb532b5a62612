"""A small GPTModel with MTP of megatron-core that runs on CPU and attends per packed document."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from cppmega.proof import cpu_shims
from cppmega.recipe import Recipe


class DocumentAttention(MegatronModule):  # type: ignore[misc]  # megatron has no types
    """Causal attention inside each document of a pack.

    Megatron's own CPU attention asserts that there are no packed sequences; its fused ones need a
    GPU. Same constructor and call as `DotProductAttention`.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> torch.Tensor:
        """query, key, value [T, heads, width] -> [T, heads * width]; padding attends to itself.

        The documents are gathered into one batch of rows as long as the longest of them: a loop
        over documents takes half of a training step where they are short.
        """
        bounds = boundaries(packed_seq_params)
        starts, lengths = bounds[:-1, None], bounds.diff()[:, None]
        places = torch.arange(int(lengths.max()))
        rows = (starts + places).clamp(max=query.size(0) - 1)
        q, k, v = (x[rows].transpose(1, 2) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale
        )
        return out.transpose(1, 2)[places < lengths].flatten(1)


def boundaries(params: Any) -> torch.Tensor:
    """Where the documents of a PackedSeqParams begin in the pack, and where the last one ends."""
    padded: torch.Tensor | None = params.cu_seqlens_q_padded
    bounds: torch.Tensor = params.cu_seqlens_q if padded is None else padded
    return bounds.long()


def build(recipe: Recipe) -> Any:
    """Build the recipe's GPTModel, in fp32 on CPU; needs `cpu_shims.init_distributed` first."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    cpu_shims.shim()
    config = TransformerConfig(
        num_layers=recipe.num_layers,
        hidden_size=recipe.hidden_size,
        ffn_hidden_size=recipe.ffn_hidden_size,
        num_attention_heads=recipe.num_attention_heads,
        mtp_num_layers=recipe.mtp_num_layers,
        mtp_loss_scaling_factor=recipe.mtp_loss_scaling_factor,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    layer = gpt_layer_specs.get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = DocumentAttention
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=recipe.vocab_size,
        max_sequence_length=recipe.seq_length,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=gpt_layer_specs.get_gpt_mtp_block_spec(
            config, layer, use_transformer_engine=False
        ),
    )


def with_optimizer(recipe: Recipe) -> tuple[Any, Any, torch.optim.Optimizer]:
    """Build the model, DDP around it, and the optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model = build(recipe)
    ddp = DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(overlap_grad_reduce=False),
        module=model,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.lr,
        betas=(recipe.adam_beta1, recipe.adam_beta2),
        weight_decay=recipe.weight_decay,
    )
    return model, ddp, optimizer
