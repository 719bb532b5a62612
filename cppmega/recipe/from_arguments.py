"""The recipe that a Megatron command line amounts to, for estimates of its memory."""

from __future__ import annotations

import math
from typing import Any

from cppmega.recipe.recipe import Recipe
from cppmega.rules.rule import Run
from cppmega.sizes import mixers
from cppmega.sizes.megatron_args import layer_pattern, uses_dsa

_SAME = (
    *("hidden_size", "num_attention_heads", "seq_length", "kv_channels", "qk_layernorm"),
    *("make_vocab_size_divisible_by", "micro_batch_size", "use_distributed_optimizer"),
    *("num_experts", "moe_router_topk", "moe_shared_expert_intermediate_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "cross_entropy_loss_fusion", "gradient_accumulation_fusion"),
)
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_SPARSE = (
    *("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
    *("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"),
)
"""Fields that have the name of their argument, as far as the estimate reads them."""


def from_arguments(run: Run, world: int | None = None) -> Recipe | None:
    """The recipe with the sizes of a run; None where it does not state its vocabulary.

    Args:
        run: Megatron's parsed arguments, before or after their validation.
        world: the number of ranks; None: the fewest that the parallel sizes allow.

    Raises:
        CppmegaError: what creating the recipe raises.
    """
    if run.vocab_size is None:
        return None
    latent, dsa, letters = bool(run.multi_latent_attention), uses_dsa(run), layer_pattern(run)
    names = (*_SAME, *_LATENT * latent, *_SPARSE * dsa)
    given = {name: value for name in names if (value := getattr(run, name)) is not None}
    if run.group_query_attention and not latent:
        given["num_query_groups"] = run.num_query_groups
    if dsa:
        given["dsa_kernel_backend"] = run.dsa_kernel_backend or "none"
    model = (run.tensor_model_parallel_size or 1) * (run.context_parallel_size or 1)
    pipes = run.pipeline_model_parallel_size or 1
    ranks = world or pipes * math.lcm(model, run.expert_model_parallel_size or 1)
    width = run.ffn_hidden_size or _default_width(run)
    return Recipe(
        **{"name": "line", "purpose": "a command line", "gpus": ranks, **_layers(run, letters)},
        **given,
        precision="fp8" if run.fp8 else "bf16",
        vocab_size=run.vocab_size,
        ffn_hidden_size=width,
        moe_ffn_hidden_size=(run.moe_ffn_hidden_size or width) if run.num_experts else None,
        activation="swiglu" if run.swiglu else "squared_relu" if run.squared_relu else "gelu",
        tied_embeddings=not run.untie_embeddings_and_output_weights,
        recompute_modules=tuple(run.recompute_modules or ()),
        cross_entropy_fusion_impl=(
            "linear" if run.cross_entropy_fusion_impl == "linear" else "native"
        ),
        global_batch_size=(run.micro_batch_size or 1) * (ranks // model),
    )


def _layers(run: Run, letters: str) -> dict[str, Any]:
    """The fields that say which layers there are, and their mixers."""
    if not letters:
        frequency = run.moe_layer_freq
        dense = [*frequency, 1].index(1) if isinstance(frequency, list) else 0
        attention = "dsa" if uses_dsa(run) else "mla" if run.multi_latent_attention else "full"
        layers = {"kind": "gpt", "num_layers": run.num_layers, "attention": attention}
        return {**layers, "first_dense_layers": dense, "mtp_num_layers": run.mtp_num_layers or 0}
    own = mixers.mamba3(run.cppmega_variables)
    fields: dict[str, Any] = {"kind": "hybrid", "pattern": letters, "mamba3": own}
    fields["m2rnn"] = mixers.m2rnn(run.cppmega_variables)
    if "M" in letters and own is None:
        heads = run.mamba_num_heads or 2 * run.hidden_size // run.mamba_head_dim
        groups, state = run.mamba_num_groups, run.mamba_state_dim
        fields["mamba2"] = mixers.Mamba2(heads, run.mamba_head_dim, state, groups)
    return fields


def _default_width(run: Run) -> int:
    """Megatron's default width of an MLP."""
    hidden: int = run.hidden_size
    return 64 * int(8 * hidden / 3 / 64) if run.swiglu else 4 * hidden
