"""Refuse recipes that cannot be trained anywhere; runs whenever a recipe is created."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace

from cppmega.errors import CppmegaError
from cppmega.features.dsa import layer_kinds as dsa_layer_kinds
from cppmega.features.mhc import options as mhc_options
from cppmega.features.mixers import sizes as mixer_sizes
from cppmega.host.wording import counted
from cppmega.recipe import pipeline
from cppmega.recipe.fields import FORBIDDEN_ARGUMENTS, Fields, invalid
from cppmega.tree import accepted

_FUSED = (2, 4, 8)
"""Numbers of streams for which there are fused kernels."""


def check(recipe: Fields) -> None:
    """Refuse a recipe that contradicts itself.

    Raises:
        CppmegaError: `recipe-invalid`, `width-not-aligned`, `bad-pattern`, `bad-accept`.
    """
    _arguments(recipe)
    accepted.from_pairs(recipe.accepted_edits)
    _layers(recipe)
    _attention(recipe)
    _indexer_loss(recipe)
    _sharing(recipe)
    _connections(recipe)
    _experts(recipe)
    _input_embeddings(recipe)
    _widths(recipe)
    _parallel(recipe)
    pipeline.check_schedule(recipe)
    _training(recipe)
    _machine(recipe)


def _arguments(recipe: Fields) -> None:
    for argument in recipe.arguments:
        name = argument.partition("=")[0]
        if name in FORBIDDEN_ARGUMENTS:
            raise invalid(
                recipe,
                f"it holds {name}.",
                "Switched-off NaN checks, mock data and loss-scaled fp16 have each hidden a "
                "broken run behind a good throughput.",
                f"leave {name} out"
                + (" and pass --mock-data to the trainer" if name == "--mock-data" else ""),
            )


def _layers(recipe: Fields) -> None:
    if recipe.kind == "hybrid":
        if recipe.num_layers or recipe.mtp_num_layers:
            raise invalid(
                recipe,
                "a hybrid recipe sets num_layers or mtp_num_layers.",
                "Both are counted from the pattern; two sources can disagree.",
                "--set num_layers=0 --set mtp_num_layers=0",
            )
    elif recipe.pattern:
        raise invalid(
            recipe,
            f"a {recipe.kind} recipe has a pattern.",
            "Only hybrid models are built from one.",
            "--set kind=hybrid, or --set pattern=",
        )
    elif not recipe.num_layers:
        raise invalid(recipe, "num_layers=0.", "A model has at least one layer.")
    elif recipe.first_dense_layers > recipe.num_layers:
        raise invalid(
            recipe,
            f"first_dense_layers={recipe.first_dense_layers} of {recipe.num_layers} layers.",
            "first_dense_layers cannot exceed num_layers.",
        )
    layout = recipe.layout
    pipeline.check_stages(recipe)
    for letter, part in (("M", "mamba3"), ("R", "m2rnn")):
        if letter in layout.letters and getattr(recipe, part) is None:
            raise invalid(
                recipe,
                f"its pattern has {letter} but {part} is None.",
                f"The sizes of that mixer are those of {part}.",
            )
    if recipe.mamba3 is not None and recipe.mamba3.problem:
        raise invalid(recipe, f"mamba3 has {recipe.mamba3.problem}.", "No kernel computes it.")
    for obstacle in mixer_sizes.obstacles(recipe, dict(recipe.variables)):
        raise obstacle


def _attention(recipe: Fields) -> None:
    if recipe.uses_mla:
        _require(
            recipe,
            "MLA and DSA layers",
            *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        )
        if recipe.num_query_groups is not None:
            raise invalid(recipe, "num_query_groups is set with MLA.", "MLA has no groups.")
    elif recipe.kv_channels is None and recipe.hidden_size % recipe.num_attention_heads:
        raise invalid(
            recipe,
            f"hidden_size={recipe.hidden_size} is not divisible by "
            f"num_attention_heads={recipe.num_attention_heads}.",
            "A head would have a fraction of a channel.",
            "--set kv_channels=..., or another hidden_size",
        )
    if recipe.uses_dsa:
        if recipe.kind == "gpt" and recipe.mtp_num_layers:
            raise invalid(
                recipe,
                "a GPT with DSA has MTP depths.",
                "Megatron's GPT builder stops on it; its hybrid builder makes the same layers.",
                "--set kind=hybrid --set pattern=D-DE/DE --set num_layers=0 --set mtp_num_layers=0",
            )
        _require(
            recipe,
            "DSA layers",
            *("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
        )
        assert recipe.dsa_indexer_topk is not None
        if recipe.dsa_indexer_topk > recipe.seq_length:
            raise invalid(
                recipe, "dsa_indexer_topk exceeds seq_length.", "Every key would be selected."
            )
        assert recipe.dsa_indexer_head_dim and recipe.qk_pos_emb_head_dim
        if recipe.dsa_indexer_head_dim < recipe.qk_pos_emb_head_dim:
            raise invalid(
                recipe,
                "dsa_indexer_head_dim is smaller than qk_pos_emb_head_dim.",
                "The indexer rotates that many channels of each head.",
            )
        head = recipe.dsa_indexer_head_dim
        if head & (head - 1):
            raise invalid(
                recipe,
                f"dsa_indexer_head_dim={head} is not a power of two.",
                "The indexer's Hadamard rotation only supports powers of two.",
            )


def _indexer_loss(recipe: Fields) -> None:
    if not recipe.dsa_dense_loss_steps:
        return
    if recipe.kind == "loop" or not recipe.uses_dsa:
        what = "dsa_dense_loss_steps without DSA layers that Megatron trains."
        raise invalid(recipe, what, "No step would differ.", "--set dsa_dense_loss_steps=0")
    if not (recipe.dsa_indexer_use_sparse_loss and recipe.dsa_indexer_loss_coeff > 0):
        raise invalid(
            recipe,
            "dsa_dense_loss_steps without a sparse indexer loss to follow.",
            "The loss would be the same in every step.",
            "--set dsa_indexer_use_sparse_loss=true, with dsa_indexer_loss_coeff above 0; or "
            "--set dsa_dense_loss_steps=0",
        )


def _sharing(recipe: Fields) -> None:
    if not recipe.dsa_index_pattern:
        return
    try:
        stages = list(pipeline.dsa_stages(recipe))
        layers = [number for stage in stages for number in stage]
        sources = dsa_layer_kinds.from_pattern(recipe.dsa_index_pattern, layers)
        for stage in stages:
            dsa_layer_kinds.check_stage(sources, stage)
    except CppmegaError as error:
        hint = "--set dsa_index_pattern=..., or another pipeline layout"
        raise invalid(recipe, error.what, error.why, hint) from error


def _connections(recipe: Fields) -> None:
    for problem in mhc_options.problems(_as_options(recipe)):
        raise invalid(recipe, problem.what, problem.why, problem.next) from problem
    what = ""
    if recipe.uses_mhc and recipe.kind == "loop":
        what = "a loop has hyper-connections, which only Megatron's models have"
    elif recipe.uses_mhc and recipe.use_fused_mhc and recipe.mhc_num_residual_streams not in _FUSED:
        what = f"the fused kernels have no {recipe.mhc_num_residual_streams} streams"
    if what:
        raise invalid(recipe, f"{what}.", "mhc_connections does not support it.")


def _as_options(recipe: Fields) -> SimpleNamespace:
    """The recipe as Megatron's options: those of its fields, and those that `plus` added."""
    fields = {
        **{name: getattr(recipe, name) for name in recipe.__dataclass_fields__},
        "enable_mhc_connections": recipe.uses_mhc,
        "use_fused_mhc": recipe.uses_mhc and recipe.use_fused_mhc,
        "fp8": recipe.fp8_format if recipe.precision == "fp8" else None,
        "recompute_granularity": "selective" if recipe.recompute_modules else None,
    }
    if recipe.virtual_pipeline_model_parallel_size == 1:
        del fields["virtual_pipeline_model_parallel_size"]
    given = [*recipe.arguments, "--"]
    for word, after in itertools.pairwise(given):
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            value = value or ("" if after.startswith("--") else after)
            number = value.replace(".", "", 1)
            name = name.replace("-", "_").removesuffix("_format")  # --fp8-format is fp8
            fields[name] = float(value) if number.isdecimal() else value or True
    return SimpleNamespace(**fields)


def _experts(recipe: Fields) -> None:
    if "E" in recipe.layout.letters:
        _require(recipe, "MoE layers", "num_experts", "moe_ffn_hidden_size")
        assert recipe.num_experts is not None
        if recipe.moe_router_topk > recipe.num_experts:
            raise invalid(
                recipe, "moe_router_topk exceeds num_experts.", "There are not enough experts."
            )
        if recipe.moe_router_enable_expert_bias and recipe.moe_router_score_function != "sigmoid":
            raise invalid(recipe, "the expert bias needs sigmoid scores.", "Megatron refuses it.")
    elif recipe.num_experts is not None and recipe.kind == "hybrid":
        raise invalid(recipe, "num_experts is set but no layer is E.", "It would have no effect.")


def _input_embeddings(recipe: Fields) -> None:
    if recipe.adds_to_embedding and recipe.kind == "loop":
        raise invalid(
            recipe,
            "ngram_hash or structure in a loop, whose model has neither.",
            "They would have no effect.",
            "--set ngram_hash=None --set structure=None",
        )
    if recipe.ngram_hash is not None and recipe.ngram_hash.problem:
        raise invalid(
            recipe,
            f"ngram_hash has {recipe.ngram_hash.problem}.",
            "Every head of every order reads its own table.",
        )


def _widths(recipe: Fields) -> None:
    if recipe.kind == "loop":
        return
    multiple = 16 if recipe.precision == "fp8" else 8
    for name, width in _matrix_widths(recipe):
        if width % multiple:
            raise CppmegaError(
                "width-not-aligned",
                f"Recipe {recipe.name}: {name}={width} is not a multiple of {multiple}.",
                f"Tensor cores process {recipe.precision} matrices in steps of {multiple}; "
                "Transformer Engine stops, or runs several times slower.",
                f"--set {name}={-(-width // multiple) * multiple}",
            )
    if recipe.precision == "fp8" and recipe.num_attention_heads % 8:
        raise CppmegaError(
            "width-not-aligned",
            f"Recipe {recipe.name}: num_attention_heads={recipe.num_attention_heads} "
            "is not a multiple of 8.",
            "FP8 attention requires it.",
            "--set precision=bf16, or another number of heads",
        )


def _matrix_widths(recipe: Fields) -> Iterator[tuple[str, int]]:
    names = (
        *("hidden_size", "ffn_hidden_size", "kv_channels", "q_lora_rank", "kv_lora_rank"),
        *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "dsa_indexer_head_dim"),
        *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "seq_length"),
    )
    for name in names:
        value = getattr(recipe, name)
        if value is not None:
            yield name, value
    yield "make_vocab_size_divisible_by", recipe.make_vocab_size_divisible_by


def _parallel(recipe: Fields) -> None:
    if (recipe.gpus == 0) != (recipe.kind == "loop"):
        raise invalid(
            recipe,
            f"gpus={recipe.gpus} does not go with kind={recipe.kind!r}.",
            "Only a loop, of kind 'loop', runs without a GPU.",
        )
    model = recipe.tensor_model_parallel_size * recipe.pipeline_model_parallel_size
    if max(recipe.gpus, 1) % model:
        raise invalid(
            recipe,
            f"{counted(recipe.gpus, 'GPU')} cannot be split into TP x PP = {model}.",
            "Every replica of the model needs TP x PP of them.",
        )
    replicas = recipe.data_parallel_size
    expert = recipe.expert_model_parallel_size
    if expert > 1 and (recipe.num_experts is None or recipe.num_experts % expert):
        raise invalid(
            recipe,
            f"{recipe.num_experts} experts do not divide into EP {expert}.",
            "Every rank holds the same number of experts.",
        )
    if replicas * recipe.tensor_model_parallel_size % expert:
        raise invalid(
            recipe,
            f"EP {expert} does not divide the {replicas} data-parallel ranks.",
            "Experts are spread over them.",
        )
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if getattr(recipe, name) % recipe.tensor_model_parallel_size:
            raise invalid(
                recipe,
                f"{name} does not divide by TP {recipe.tensor_model_parallel_size}.",
                "Every rank computes an equal share.",
            )
    if recipe.global_batch_size % (recipe.micro_batch_size * replicas):
        raise invalid(
            recipe,
            f"global_batch_size={recipe.global_batch_size} is not a multiple of "
            f"micro_batch_size x data-parallel ranks = {recipe.micro_batch_size} x {replicas}.",
            "Some rank would get a part of a micro-batch.",
            f"--set global_batch_size={recipe.micro_batch_size * replicas}",
        )
    if recipe.overlap_param_gather and not (
        recipe.overlap_grad_reduce and recipe.use_distributed_optimizer
    ):
        raise invalid(
            recipe,
            "overlap_param_gather without overlap_grad_reduce and the distributed optimizer.",
            "Megatron refuses it.",
        )


def _training(recipe: Fields) -> None:
    if recipe.kind == "loop" and recipe.eval_interval:
        raise invalid(recipe, "eval_interval in a loop.", "A loop has its own held-out data.")
    if recipe.dist_ckpt_optim_fully_reshardable and (
        recipe.kind == "loop" or not recipe.use_distributed_optimizer
    ):
        raise invalid(
            recipe,
            "dist_ckpt_optim_fully_reshardable without Megatron's distributed optimizer.",
            "It is a format of that optimizer's states; other optimizers always save by parameter.",
            "--set dist_ckpt_optim_fully_reshardable=false",
        )
    if recipe.kind == "loop" and (recipe.async_save or recipe.keep_checkpoints):
        raise invalid(recipe, "async_save or keep_checkpoints in a loop.", "It has neither.")
    if recipe.precision == "fp32" and recipe.kind != "loop":
        raise invalid(recipe, "fp32 is for loops on CPU.", "DSA and the experts run in bf16.")
    if recipe.cuda_graph_modules and recipe.cuda_graph_impl == "none":
        raise invalid(
            recipe,
            "cuda_graph_modules without cuda_graph_impl.",
            "Megatron accepts it and captures nothing.",
            "--set cuda_graph_impl=transformer_engine",
        )
    if recipe.document_multiple > 1:
        if not recipe.packed_documents:
            raise invalid(
                recipe, "document_multiple without packed_documents.", "There is nothing to pad."
            )
        if recipe.seq_length % recipe.document_multiple:
            raise invalid(
                recipe,
                "seq_length is not a multiple of document_multiple.",
                "The last document of a pack would not fit into it.",
            )
    if recipe.packed_documents and recipe.cuda_graph_impl != "none":
        raise invalid(
            recipe,
            "packed_documents with CUDA graphs.",
            "The number of documents changes from step to step; a graph has one.",
        )


def _machine(recipe: Fields) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", recipe.name):
        raise invalid(
            recipe,
            f"{recipe.name!r} is not a valid name.",
            "Run folders are named after it, and it is typed in commands.",
            "letters, digits, - and _, in the recipe and in the name of its file",
        )
    if bool(recipe.cut) != ("cut" in recipe.name.split("_")):
        raise invalid(
            recipe,
            f"cut={recipe.cut!r} does not go with its name.",
            "Numbers of a part of a model must not be taken for those of the whole.",
            "a name with the word cut for a recipe with the field cut, and for no other",
        )
    for architecture in recipe.architectures:
        if not re.fullmatch(r"sm_\d{2,3}", architecture):
            what = f"{architecture!r} is not a CUDA architecture (expected e.g. sm_90)."
            raise invalid(recipe, what, "No GPU would match it.")
    _stack(recipe)


def _stack(recipe: Fields) -> None:
    if not recipe.stack:
        return
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # every command would wait

    for name, versions in recipe.stack:
        try:
            SpecifierSet(versions)
        except InvalidSpecifier:
            what = f"stack: {name} {versions!r} is not a version specifier (PEP 440, e.g. >=2.11)."
            raise invalid(recipe, what, "No installed version could be compared with it.") from None


def _require(recipe: Fields, what: str, *names: str) -> None:
    missing = [name for name in names if getattr(recipe, name) is None]
    if missing:
        raise invalid(recipe, f"{what} need {', '.join(missing)}.", "They have no default.")
