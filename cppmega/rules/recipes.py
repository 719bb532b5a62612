"""Rules of a recipe's own fields: contradictions that no Megatron argument shows.

A question is asked about the recipe itself, and sentences name its fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cppmega.host.wording import counted
from cppmega.rules.rule import Part, Table, stated

FORBIDDEN = {
    "--no-check-for-nan-in-loss-and-grad": "leave it out",
    "--mock-data": "leave it out and pass --mock-data to the trainer",
    "--fp16": "leave it out",
}
"""No recipe may contain these: NaN checks stay on, and only a start can request mock data."""

_WIDTHS = (
    *("hidden_size", "ffn_hidden_size", "kv_channels", "q_lora_rank", "kv_lora_rank"),
    *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "dsa_indexer_head_dim"),
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "seq_length"),
    "make_vocab_size_divisible_by",
)


def _unset(*names: str) -> Callable[[Any], object]:
    """Whether sizes that have no default are not set, and which."""

    def unset(recipe: Any) -> object:
        missing = [name for name in names if getattr(recipe, name) is None]
        return missing and {"unset": ", ".join(missing)}

    return unset


def _contradictory(sizes: str) -> Callable[[Any], object]:
    """The contradiction within the sizes of a part, if it has any."""

    def problem(recipe: Any) -> object:
        stated = getattr(recipe, sizes)
        return stated is not None and stated.problem and {"problem": stated.problem}

    return problem


def _is_loop(recipe: Any) -> bool:
    return bool(recipe.kind == "loop")


def _is_hybrid(recipe: Any) -> bool:
    return bool(recipe.kind == "hybrid")


def _has(letter: str) -> Callable[[Any], bool]:
    return lambda recipe: letter in recipe.layout.letters


def _unreadable_versions(recipe: Any) -> Iterator[Mapping[str, str]]:
    if not recipe.stack:
        return
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # every command would wait

    for package, versions in recipe.stack:
        try:
            SpecifierSet(versions)
        except InvalidSpecifier:
            yield {"package": package, "versions": repr(versions)}


def _marks_differ(recipe: Any) -> object:
    """Whether a hybrid model's layers do not form as many stages as the recipe has."""
    marked = recipe.layout.stages
    if marked == recipe.stages:
        return "" in recipe.layers_by_stage and {"how": "has an empty stage"}
    return {"how": f"marks {marked} stages" if marked > 1 else "does not divide evenly"}


def _unaligned(recipe: Any) -> Iterator[Mapping[str, object]]:
    multiple = 16 if recipe.precision == "fp8" else 8
    for name in _WIDTHS if not _is_loop(recipe) else ():
        width = getattr(recipe, name)
        if width is not None and width % multiple:
            better = -(-width // multiple) * multiple
            yield {"field": name, "width": width, "multiple": multiple, "better": better}


def _gpus_do_not_split(recipe: Any) -> object:
    model = recipe.tensor_model_parallel_size * recipe.pipeline_model_parallel_size
    model *= recipe.context_parallel_size
    gpus = counted(recipe.gpus, "GPU")
    return max(recipe.gpus, 1) % model and {"model": model, "counted": gpus}


def _incomplete_groups(recipe: Any) -> object:
    """Whether the interleaved schedule gets micro-batches that do not fill its last group."""
    ranks, count = recipe.pipeline_model_parallel_size, recipe.micro_batches
    if recipe.virtual_pipeline_model_parallel_size == 1 or not count % ranks:
        return False
    more = recipe.global_batch_size // count * (count + ranks - count % ranks)
    return {"count": counted(count, "micro-batch", "micro-batches"), "ranks": ranks, "more": more}


_TABLE: Table = {
    "arguments": {
        "it holds {argument}.": (
            lambda recipe: (
                {"argument": name, "instead": FORBIDDEN[name]}
                for name in (argument.partition("=")[0] for argument in recipe.arguments)
                if name in FORBIDDEN
            ),
            "Switched-off NaN checks, mock data and loss-scaled fp16 have each hidden a broken run "
            "behind a good throughput.",
            "{instead}",
        ),
    },
    "names": {
        "{name!r} is not a valid name.": (
            lambda recipe: not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", recipe.name),
            "Run folders are named after it, and it is typed in commands.",
            "letters, digits, - and _, in the recipe and in the name of its file",
        ),
        "cut={cut!r} does not match its name.": (
            lambda recipe: bool(recipe.cut) != ("cut" in recipe.name.split("_")),
            "Numbers of a part of a model must not be taken for those of the whole.",
            "a name with the word cut for a recipe with the field cut, and for no other",
        ),
    },
    "the stack": {
        "{architecture} is not a CUDA architecture (expected e.g. sm_90).": (
            lambda recipe: (
                {"architecture": repr(name)}
                for name in recipe.architectures
                if not re.fullmatch(r"sm_\d{2,3}", name)
            ),
            "No GPU would match it.",
        ),
        "stack: {package} {versions} is not a version specifier (PEP 440, e.g. >=2.11).": (
            _unreadable_versions,
            "No installed version could be compared with it.",
        ),
    },
    Part("layers of hybrid models", _is_hybrid): {
        "a hybrid recipe sets num_layers or mtp_num_layers.": (
            lambda recipe: recipe.num_layers or recipe.mtp_num_layers,
            "Both are counted from the pattern; two sources can disagree.",
            "--set num_layers=0 --set mtp_num_layers=0",
        ),
        "Pattern {pattern!r} {how}, and the recipe has PP {pipeline_model_parallel_size} x "
        "VPP {virtual_pipeline_model_parallel_size} = {stages} stages.": (
            _marks_differ,
            "Every rank needs the same number of stages, with a layer in each.",
            "one | between any two stages, or other values of pipeline_model_parallel_size and "
            "virtual_pipeline_model_parallel_size",
            "bad-pattern",
        ),
        "num_experts is set but no layer is E.": (
            lambda recipe: recipe.num_experts is not None and not _has("E")(recipe),
            "It would have no effect.",
        ),
    },
    Part("layers of GPT models", lambda recipe: not _is_hybrid(recipe)): {
        "a {kind} recipe has a pattern.": (
            lambda recipe: recipe.pattern,
            "Only hybrid models are built from one.",
            "--set kind=hybrid, or --set pattern=",
        ),
        "num_layers=0.": (
            lambda recipe: not recipe.num_layers,
            "A model has at least one layer.",
        ),
        "first_dense_layers={first_dense_layers} of {num_layers} layers.": (
            lambda recipe: recipe.first_dense_layers > recipe.num_layers,
            "first_dense_layers cannot exceed num_layers.",
        ),
        "num_layers={num_layers} does not divide into PP {pipeline_model_parallel_size} x VPP "
        "{virtual_pipeline_model_parallel_size} = {stages} stages.": (
            lambda recipe: recipe.num_layers % recipe.stages,
            "Every stage of a GPT has the same number of layers.",
        ),
    },
    "mixers": {
        "its pattern has M without mamba2 or mamba3.": (
            lambda recipe: _has("M")(recipe) and not (recipe.mamba2 or recipe.mamba3),
            "These are the sizes of that mixer.",
        ),
        "its pattern has R without m2rnn.": (
            lambda recipe: _has("R")(recipe) and not recipe.m2rnn,
            "These are the sizes of that mixer.",
        ),
        "mamba2 and mamba3 are both set.": (
            lambda recipe: recipe.mamba2 and recipe.mamba3,
            "The layers M of a model have one mixer.",
            "--set mamba2=None, or --set mamba3=None",
        ),
        "mamba3 has {problem}.": (_contradictory("mamba3"), "No kernel computes it."),
    },
    "n-gram and structure embeddings": {
        "ngram_hash has {problem}.": (
            _contradictory("ngram_hash"),
            "Every head of every order reads its own table.",
        ),
    },
    Part("MLA", lambda recipe: recipe.uses_mla): {
        "MLA and DSA layers need {unset}.": (
            _unset("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
            "They have no default.",
        ),
        "num_query_groups is set with MLA.": (
            lambda recipe: recipe.num_query_groups is not None,
            "MLA has no groups.",
        ),
    },
    Part("attention without MLA", lambda recipe: not recipe.uses_mla): {
        "hidden_size={hidden_size} is not divisible by num_attention_heads="
        "{num_attention_heads}.": (
            lambda recipe: (
                recipe.kv_channels is None and recipe.hidden_size % recipe.num_attention_heads
            ),
            "A head would have a fraction of a channel.",
            "--set kv_channels=..., or another hidden_size",
        ),
    },
    Part("DSA", lambda recipe: recipe.uses_dsa): {
        "a GPT with DSA has MTP depths.": (
            lambda recipe: recipe.kind == "gpt" and recipe.mtp_num_layers,
            "Megatron's GPT builder stops on it; its hybrid builder makes the same layers.",
            "--set kind=hybrid --set pattern=D-DE/DE --set num_layers=0 --set mtp_num_layers=0",
        ),
        "DSA layers need {unset}.": (
            _unset("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
            "They have no default.",
        ),
        "dsa_indexer_topk exceeds seq_length.": (
            lambda recipe: (recipe.dsa_indexer_topk or 0) > recipe.seq_length,
            "Every key would be selected.",
        ),
        "dsa_indexer_head_dim is smaller than qk_pos_emb_head_dim.": (
            lambda recipe: (recipe.dsa_indexer_head_dim or 0) < (recipe.qk_pos_emb_head_dim or 0),
            "The indexer rotates that many channels of each head.",
        ),
        "dsa_indexer_head_dim={dsa_indexer_head_dim} is not a power of two.": (
            lambda recipe: (head := recipe.dsa_indexer_head_dim or 1) & (head - 1),
            "The indexer's Hadamard rotation only supports powers of two.",
        ),
    },
    Part("the dense steps of DSA's indexer", lambda recipe: recipe.dsa_dense_loss_steps): {
        "dsa_dense_loss_steps without DSA layers that Megatron trains.": (
            lambda recipe: _is_loop(recipe) or not recipe.uses_dsa,
            "No step would differ.",
            "--set dsa_dense_loss_steps=0",
        ),
        "dsa_dense_loss_steps without a sparse indexer loss to follow.": (
            lambda recipe: (
                not recipe.dsa_indexer_use_sparse_loss or recipe.dsa_indexer_loss_coeff <= 0
            ),
            "The loss would be the same in every step.",
            "--set dsa_indexer_use_sparse_loss=true, with dsa_indexer_loss_coeff above 0; or --set "
            "dsa_dense_loss_steps=0",
        ),
    },
    Part("experts", _has("E")): {
        "MoE layers need {unset}.": (
            _unset("num_experts", "moe_ffn_hidden_size"),
            "They have no default.",
        ),
        "moe_router_topk exceeds num_experts.": (
            lambda recipe: recipe.moe_router_topk > (recipe.num_experts or 0),
            "There are not enough experts.",
        ),
        "the expert bias needs sigmoid scores.": (
            lambda recipe: (
                recipe.moe_router_enable_expert_bias
                and recipe.moe_router_score_function != "sigmoid"
            ),
            "Megatron refuses it.",
        ),
    },
    "the token dispatcher": {
        "moe_flex_dispatcher_backend={moe_flex_dispatcher_backend!r} without the dispatcher "
        "flex.": (
            lambda recipe: (
                recipe.moe_flex_dispatcher_backend and recipe.moe_token_dispatcher_type != "flex"
            ),
            "It would have no effect.",
            "--set moe_token_dispatcher_type=flex, or --set moe_flex_dispatcher_backend=None",
        ),
        "DeepEP has no ranks to dispatch tokens to: TP x EP is 1.": (
            lambda recipe: (
                recipe.moe_token_dispatcher_type == "flex"
                and recipe.moe_flex_dispatcher_backend != "hybridep"
                and recipe.tensor_model_parallel_size * recipe.expert_model_parallel_size == 1
            ),
            "Megatron refuses it while it builds the model.",
            "--set moe_token_dispatcher_type=alltoall, or a larger expert_model_parallel_size",
        ),
    },
    "widths": {
        "{field}={width} is not a multiple of {multiple}.": (
            _unaligned,
            "Tensor cores process {precision} matrices in steps of {multiple}; Transformer Engine "
            "stops, or runs several times slower.",
            "--set {field}={better}",
            "width-not-aligned",
        ),
    },
    "ranks": {
        "gpus={gpus} is not supported with kind={kind!r}.": (
            lambda recipe: (recipe.gpus == 0) != _is_loop(recipe),
            "Only a loop, of kind 'loop', runs without a GPU.",
        ),
        "{counted} cannot be split into TP x CP x PP = {model}.": (
            _gpus_do_not_split,
            "Every replica of the model needs TP x CP x PP of them.",
        ),
        "{num_experts} experts do not divide into EP {expert_model_parallel_size}.": (
            lambda recipe: (
                recipe.expert_model_parallel_size > 1
                and (recipe.num_experts or 1) % recipe.expert_model_parallel_size
            ),
            "Every rank holds the same number of experts.",
        ),
        "EP {expert_model_parallel_size} does not divide the {data_parallel_size} "
        "data-parallel ranks.": (
            lambda recipe: (
                recipe.data_parallel_size
                * recipe.context_parallel_size
                * recipe.tensor_model_parallel_size
                % recipe.expert_model_parallel_size
            ),
            "Experts are spread over them.",
        ),
        "{field} does not divide by TP {tensor_model_parallel_size}.": (
            lambda recipe: (
                {"field": name}
                for name in ("num_attention_heads", "ffn_hidden_size")
                if getattr(recipe, name) % recipe.tensor_model_parallel_size
            ),
            "Every rank computes an equal share.",
        ),
    },
    "batches": {
        "global_batch_size={global_batch_size} is not a multiple of micro_batch_size x "
        "data-parallel ranks = {micro_batch_size} x {data_parallel_size}.": (
            lambda recipe: (
                recipe.global_batch_size
                % (passes := recipe.micro_batch_size * recipe.data_parallel_size)
                and {"passes": passes}
            ),
            "Some rank would get a part of a micro-batch.",
            "--set global_batch_size={passes}",
        ),
    },
    Part(
        "virtual pipeline stages",
        lambda recipe: recipe.virtual_pipeline_model_parallel_size > 1,
    ): {
        "virtual_pipeline_model_parallel_size={virtual_pipeline_model_parallel_size} without "
        "pipeline ranks.": (
            lambda recipe: recipe.pipeline_model_parallel_size == 1,
            "The stages of a single rank have no other rank's stages to alternate with.",
            "--set pipeline_model_parallel_size=2, or --set virtual_pipeline_model_parallel_size=1",
        ),
        "{count} per step on {ranks} ranks with virtual stages.": (
            _incomplete_groups,
            "Megatron's interleaved schedule needs groups of as many as there are ranks.",
            "--set global_batch_size={more}",
        ),
    },
    "the optimizer": {
        "overlap_param_gather without overlap_grad_reduce and the distributed optimizer.": (
            lambda recipe: (
                recipe.overlap_param_gather
                and not (recipe.overlap_grad_reduce and recipe.use_distributed_optimizer)
            ),
            "Megatron refuses it.",
        ),
        "dist_ckpt_optim_fully_reshardable without Megatron's distributed optimizer.": (
            lambda recipe: (
                recipe.dist_ckpt_optim_fully_reshardable
                and (_is_loop(recipe) or not recipe.use_distributed_optimizer)
            ),
            "It is a format of that optimizer's states; other optimizers always save by parameter.",
            "--set dist_ckpt_optim_fully_reshardable=false",
        ),
    },
    Part("loops", _is_loop): {
        "ngram_hash or structure in a loop, whose model has neither.": (
            lambda recipe: recipe.adds_to_embedding,
            "They would have no effect.",
            "--set ngram_hash=None --set structure=None",
        ),
        "a loop has hyper-connections, which only Megatron's models have.": (
            lambda recipe: recipe.uses_mhc,
            "mhc_connections does not support it.",
        ),
        "eval_interval in a loop.": (
            lambda recipe: recipe.eval_interval,
            "A loop has its own held-out data.",
        ),
        "async_save or keep_checkpoints in a loop.": (
            lambda recipe: recipe.async_save or recipe.keep_checkpoints,
            "It has neither.",
        ),
    },
    Part("context parallelism", lambda recipe: recipe.context_parallel_size > 1): {
        "seq_length={seq_length} is not a multiple of 2 x CP {context_parallel_size}.": (
            lambda recipe: recipe.seq_length % (2 * recipe.context_parallel_size),
            "Every rank has a piece from the front of a sequence, and one from the back.",
        ),
    },
    "training by Megatron": {
        "fp32 is for loops on CPU.": (
            lambda recipe: recipe.precision == "fp32" and not _is_loop(recipe),
            "DSA and the experts run in bf16.",
        ),
        "cuda_graph_modules without cuda_graph_impl.": (
            lambda recipe: recipe.cuda_graph_modules and recipe.cuda_graph_impl == "none",
            "Megatron accepts it and captures nothing.",
            "--set cuda_graph_impl=transformer_engine",
        ),
    },
    "documents": {
        "document_multiple without packed_documents.": (
            lambda recipe: recipe.document_multiple > 1 and not recipe.packed_documents,
            "There is nothing to pad.",
        ),
        "seq_length is not a multiple of document_multiple.": (
            lambda recipe: recipe.packed_documents and recipe.seq_length % recipe.document_multiple,
            "The last document of a pack would not fit into it.",
        ),
    },
}

RULES = stated(_TABLE, cure="--set FIELD=VALUE, or the recipe's file")
