"""DSA layers for proofs on CPU: one whose index-score inputs are given, and a block of layers."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any


def layer(q: Any, k: Any, weights: Any, topk: int, **config: Any) -> Any:
    """Build a layer in training mode whose indexer's projections are given.

    Args:
        q: `[sq, b, index heads, d]`.
        k: `[sk, b, d]`.
        weights: `[sq, b, index heads]`.
        topk: keys per query.
        config: fields of Megatron's configuration.
    """
    import torch
    from megatron.core.transformer.experimental_attention_variant import dsa

    after_dense_steps()
    attention = dsa.DSAttention.__new__(dsa.DSAttention)
    torch.nn.Module.__init__(attention)
    defaults = {
        "dsa_indexer_loss_coeff": 1.0,
        "dsa_indexer_use_sparse_loss": False,
        "dsa_indexer_scoring_relu": True,
        "num_layers": 1,
        "mtp_num_layers": None,  # dev reads it
        "sequence_parallel": False,
        "calculate_per_token_loss": False,
        "attention_backend": "unfused",
        "dsa_kernel_backend": "none",
    }
    attention.config = SimpleNamespace(**{**defaults, **config})
    attention.softmax_scale, attention.layer_number = 1.0, 1
    # The log of the losses is on the GPU, which a proof on the CPU does not have.
    dsa.DSAIndexerLossLoggingHelper.save_loss_to_tracker = staticmethod(lambda *_, **__: None)
    attention.pg_collection = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1), cp=None)
    attention.indexer = indexer(lambda *inputs: (q, k, weights), topk, attention.pg_collection)
    # Attributes that 0.19 added.
    attention.index_topk, attention.index_share, attention.skip_topk = topk, False, False
    attention.cp_comm_type = "p2p"
    return attention


def after_dense_steps() -> None:
    """Let the configuration choose the loss even if `dsa_dense_loss_warmup` is applied."""
    from cppmega.features.dsa import loss_schedule as dsa_loss_schedule

    if dsa_loss_schedule.STEPS not in os.environ:
        os.environ[dsa_loss_schedule.STEPS] = "1"
        dsa_loss_schedule.begin_step(1)


def indexer(project: Any, topk: int, groups: Any) -> Any:
    """Build an indexer that projects its inputs with a function.

    Args:
        project: from `x` and `qr` to the inputs of the scores, as `layer` takes them.
        topk: keys per query.
        groups: process groups.
    """
    return SimpleNamespace(
        index_topk=topk,
        pg_collection=groups,
        forward_before_topk=project,
        forward_with_scores=_with_scores(project, topk),
    )


def _with_scores(project: Any, topk: int) -> Any:
    """An indexer's method, to which `dsa_indexer_kernels` adds a parameter in 0.16."""

    def forward_with_scores(
        *inputs: Any, before_topk: bool = False, mask: Any = None, **_: Any
    ) -> Any:
        import torch

        q, k, weights = project(*inputs)
        if before_topk:
            return q, k, weights
        scores = torch.einsum("sbht,sbh->bst", torch.einsum("sbhd,tbd->sbht", q, k).relu(), weights)
        scores = scores + mask
        return scores, scores.topk(topk)[1]

    return forward_with_scores


def block(here: int, before: int = 0, **options: Any) -> Any:
    """Build a stage of a GPT model whose layers consist only of the attention.

    Args:
        here: how many of the layers this stage has.
        before: how many earlier stages have.
        options: fields of Megatron's configuration.
    """
    import torch
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import (
        TransformerBlock,
        TransformerBlockSubmodules,
    )

    from cppmega.proof import small_models

    parts = dsa.DSAIndexerSubmodules(
        small_models.Projection, small_models.Projection, small_models.Norm, small_models.Projection
    )
    indexer = dsa.DSAttentionSubmodules(ModuleSpec(dsa.DSAIndexer, submodules=parts))

    class Layer(torch.nn.Module):
        def __init__(self, config: Any, layer_number: int, pg_collection: Any, **ignored: Any):
            super().__init__()
            self.layer_number = layer_number + before
            self.self_attention = torch.nn.Module()
            self.self_attention.core_attention = dsa.DSAttention(
                config, indexer, self.layer_number, AttnMaskType.causal, "self"
            )

    config = small_models.dsa_config(**options)
    layers = TransformerBlockSubmodules(layer_specs=[ModuleSpec(Layer)] * here)
    return TransformerBlock(config, layers, post_layer_norm=False)
