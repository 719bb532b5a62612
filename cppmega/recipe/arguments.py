"""What each part of a recipe is among Megatron's arguments, by their newest names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cppmega.recipe.fields import Fields
from cppmega.recipe.run_options import RunOptions
from cppmega.sizes.mixers import Mamba2

Argument = tuple[str, tuple[str, ...]]
"""A name and its values."""

_NEVER = 1_000_000_000
"""Steps between evaluations in a run that has none; Megatron divides by it."""


def arguments(
    recipe: Fields, line: tuple[int, int], options: RunOptions, eod: int | None
) -> Iterator[Argument]:
    """Every argument of a start, with its values, in the order of the launch line.

    Args:
        recipe: the run.
        line: release line of the installed Megatron, such as (0, 19).
        options: of this start.
        eod: id of the token that ends a document, where the data states it.
    """
    yield from _model(recipe, line)
    if _can_attend(recipe, line):
        yield from _latent(recipe)
    if "E" in recipe.layout.letters:
        yield from _experts(recipe)
    yield from _states(recipe, line)
    yield from _connections(recipe, line)
    yield from _parallel(recipe)
    yield from _training(recipe)
    yield from _recompute(recipe, line)
    yield from _vocabulary(recipe, line, eod)
    yield from _run(recipe, options)


def _model(recipe: Fields, line: tuple[int, int]) -> Iterator[Argument]:
    layout = recipe.layout
    if recipe.kind == "hybrid":
        kept = layout.without(recipe.unknown_to(line))
        yield "--hybrid-layer-pattern", (kept.render(),)
    else:
        yield from _values(recipe, "num_layers")
        if recipe.mtp_num_layers:
            yield from _values(recipe, "mtp_num_layers")
    yield from _values(
        recipe, "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "seq_length"
    )
    yield "--max-position-embeddings", (str(recipe.seq_length),)
    if recipe.num_query_groups is not None:
        yield "--group-query-attention", ()
        yield from _values(recipe, "num_query_groups")
    yield "--normalization", ("RMSNorm",)
    yield from _values(recipe, "norm_epsilon", "init_method_std", "position_embedding_type")
    yield from _values(recipe, "rotary_base")
    yield "--disable-bias-linear", ()
    yield "--attention-dropout", ("0.0",)
    yield "--hidden-dropout", ("0.0",)
    # What is left of bias, dropout and addition is the addition, and Megatron compiles a function
    # for the three, whose calls cost the host more than they save.
    yield "--no-bias-dropout-fusion", ()
    if recipe.activation != "gelu":
        yield {"swiglu": "--swiglu", "squared_relu": "--squared-relu"}[recipe.activation], ()
    if not recipe.tied_embeddings:
        yield "--untie-embeddings-and-output-weights", ()
    if recipe.qk_layernorm:
        yield "--qk-layernorm", ()
    if recipe.uses_mla:
        # Megatron fuses MLA's rotary embedding with YaRN alone, and never DSA's.
        yield "--no-rope-fusion", ()
    if layout.depths:
        yield from _values(recipe, "mtp_loss_scaling_factor")


def _can_attend(recipe: Fields, line: tuple[int, int]) -> bool:
    """Whether that release can build any of the recipe's latent attention."""
    if recipe.kind != "hybrid":
        return recipe.uses_mla
    left = recipe.layout.without(recipe.unknown_to(line))
    return bool(set("D+") & set(left.letters))


def _latent(recipe: Fields) -> Iterator[Argument]:
    yield "--multi-latent-attention", ()
    yield "--rope-type", ("rope",)  # Megatron's default for MLA is yarn
    yield from _values(
        recipe, "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"
    )
    if recipe.uses_dsa:
        if recipe.kind == "gpt":
            yield "--experimental-attention-variant", ("dsa",)
        yield from _values(
            recipe, "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"
        )
        yield from _values(recipe, "dsa_indexer_loss_coeff")
        if recipe.dsa_indexer_use_sparse_loss:
            yield "--dsa-indexer-use-sparse-loss", ()
        if recipe.dsa_kernel_backend is not None:
            yield "--dsa-kernel-backend", (recipe.dsa_kernel_backend,)


def _experts(recipe: Fields) -> Iterator[Argument]:
    yield from _values(
        recipe,
        *("num_experts", "moe_router_topk", "moe_ffn_hidden_size"),
        *("moe_shared_expert_intermediate_size", "moe_router_score_function"),
        *("moe_aux_loss_coeff", "moe_token_dispatcher_type", "moe_router_topk_scaling_factor"),
        "moe_flex_dispatcher_backend",
    )
    yield "--moe-router-load-balancing-type", ("aux_loss" if recipe.moe_aux_loss_coeff else "none",)
    yield "--moe-router-dtype", ("fp32",)
    if recipe.moe_router_enable_expert_bias:
        yield "--moe-router-enable-expert-bias", ()
    for name in ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"):
        if getattr(recipe, name):
            yield _flag(name), ()
    if recipe.kind == "gpt":
        dense, moe = recipe.first_dense_layers, recipe.num_layers - recipe.first_dense_layers
        yield "--moe-layer-freq", (f"([0]*{dense}+[1]*{moe})",)


def _states(recipe: Fields, line: tuple[int, int]) -> Iterator[Argument]:
    """Sizes of Mamba-2, and those with which Megatron's FLOP count treats Mamba-3 like it."""
    sizes = recipe.mamba2 or recipe.mamba3
    if sizes is None or "M" not in recipe.layout.without(recipe.unknown_to(line)).letters:
        return
    heads = sizes.heads if isinstance(sizes, Mamba2) else sizes.heads(recipe.hidden_size)
    yield "--mamba-state-dim", (str(sizes.state_dim),)
    yield "--mamba-head-dim", (str(sizes.head_dim),)
    yield "--mamba-num-groups", (str(sizes.groups),)
    yield "--mamba-num-heads", (str(heads),)


def _connections(recipe: Fields, line: tuple[int, int]) -> Iterator[Argument]:
    if not recipe.uses_mhc or line < (0, 19):
        return
    yield "--enable-mhc-connections", ()
    yield from _values(recipe, "mhc_num_residual_streams", "mhc_sinkhorn_iterations")
    yield from _values(recipe, "mhc_init_gating_factor", "mhc_recompute_layer_num")
    if recipe.use_fused_mhc:
        yield "--use-fused-mhc", ()


def _parallel(recipe: Fields) -> Iterator[Argument]:
    yield from _values(
        recipe,
        *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
        "expert_model_parallel_size",
    )
    yield from _context(recipe)
    virtual = recipe.virtual_pipeline_model_parallel_size
    if recipe.kind != "hybrid" and virtual > 1:  # a hybrid model's pattern determines it
        yield "--num-virtual-stages-per-pipeline-rank", (str(virtual),)
    if recipe.tensor_model_parallel_size > 1:
        yield "--sequence-parallel", ()
    for name in (
        *("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
        "ddp_average_in_collective",
        "dist_ckpt_optim_fully_reshardable",
    ):
        if getattr(recipe, name):
            yield _flag(name), ()


def _context(recipe: Fields) -> Iterator[Argument]:
    if recipe.context_parallel_size == 1:
        return
    yield from _values(recipe, "context_parallel_size")
    if recipe.uses_dsa:
        # DSA has no other exchange, and Megatron requires the same of all layers beside it.
        yield "--cp-comm-type", ("all_gather",)


def _training(recipe: Fields) -> Iterator[Argument]:
    yield from _values(recipe, "micro_batch_size", "global_batch_size", "train_iters", "seed")
    yield from _values(recipe, "lr", "min_lr", "lr_decay_style", "lr_warmup_iters")
    # Megatron requires the warm-up to be shorter than the decay.
    yield "--lr-decay-iters", (str(max(recipe.train_iters, recipe.lr_warmup_iters + 1)),)
    # A resumed run follows the recipe as rendered now, not the schedule in the checkpoint.
    yield "--override-opt_param-scheduler", ()
    yield from _values(recipe, "weight_decay", "adam_beta1", "adam_beta2", "clip_grad")
    yield "--bf16", ()
    if recipe.precision == "fp8":
        yield from _values(recipe, "fp8_format", "fp8_recipe")
    yield "--transformer-impl", ("transformer_engine",)
    if not recipe.gradient_accumulation_fusion:  # Megatron's default is to fuse
        yield "--no-gradient-accumulation-fusion", ()
    if recipe.cross_entropy_loss_fusion:
        yield "--cross-entropy-loss-fusion", ()
        yield from _values(recipe, "cross_entropy_fusion_impl")
    if recipe.cuda_graph_impl != "none":
        yield from _values(recipe, "cuda_graph_impl")
        if recipe.cuda_graph_modules:
            yield "--cuda-graph-modules", recipe.cuda_graph_modules


def _recompute(recipe: Fields, line: tuple[int, int]) -> Iterator[Argument]:
    modules = recipe.recompute_modules
    if not _can_attend(recipe, line):
        # Megatron refuses it in a model without latent attention.
        modules = tuple(module for module in modules if module != "mla_up_proj")
    if modules:
        yield "--recompute-granularity", ("selective",)
        yield "--recompute-modules", modules


def _vocabulary(recipe: Fields, line: tuple[int, int], eod: int | None) -> Iterator[Argument]:
    # The data are token ids; Megatron only asks the tokenizer how many there are. NullTokenizer
    # of 0.17 adds one for the end of a document; since 0.18 an argument names it.
    known = recipe.vocab_size - (1 if line < (0, 18) else 0)
    yield "--tokenizer-type", ("NullTokenizer",)
    yield "--vocab-size", (str(known),)
    yield from _values(recipe, "make_vocab_size_divisible_by")
    if eod is not None:
        yield "--null-tokenizer-eod-id", (str(eod),)


def _run(recipe: Fields, options: RunOptions) -> Iterator[Argument]:
    yield "--eval-iters", (str(recipe.eval_iters),)
    yield "--eval-interval", (str(recipe.eval_interval or _NEVER),)
    yield "--log-interval", (str(options.log_interval),)
    yield "--log-throughput", ()
    # A NaN in loss or gradient ends the run immediately, even in its first step. Megatron's default
    # repeats the step, saves the damaged weights, and does not check the first step.
    yield "--rerun-mode", ("disabled",)
    yield "--no-create-attention-mask-in-dataloader", ()  # every attention here is causal
    if options.mock_data:
        yield "--mock-data", ()
    elif options.data:
        yield "--data-path", options.data
        yield "--split", ("1,0,0",)
    if recipe.packed_documents:
        yield "--eod-mask-loss", ()
    if options.data_cache is not None:
        yield "--data-cache-path", (str(options.data_cache),)
    if options.save is not None:
        yield "--save", (str(options.save),)
        yield "--save-interval", (str(options.save_interval),)
        yield "--exit-signal-handler", ()  # SIGTERM saves before it ends
        if recipe.async_save:
            yield "--async-save", ()
            yield "--async-strategy", ("mcore",)  # the other one is a separate package
            yield "--use-persistent-ckpt-worker", ()  # without it Megatron saves synchronously
    if options.load is not None:
        yield "--load", (str(options.load),)
    if options.exit_interval is not None:
        yield "--exit-interval", (str(options.exit_interval),)
    if options.tensorboard is not None:
        yield "--tensorboard-dir", (str(options.tensorboard),)
        yield "--log-timers-to-tensorboard", ()
        yield "--log-memory-to-tensorboard", ()
    if options.wandb_project:
        yield "--wandb-project", (options.wandb_project,)
        yield "--wandb-exp-name", (options.wandb_name or recipe.name,)
        # Megatron's default is a folder below --save, even where --save is not set.
        yield "--wandb-save-dir", (str((options.save or Path()) / "wandb"),)


def _values(recipe: Fields, *names: str) -> Iterator[Argument]:
    """Arguments named like their field; None leaves Megatron's default."""
    for name in names:
        value = getattr(recipe, name)
        if value is not None:
            yield _flag(name), (str(value),)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
