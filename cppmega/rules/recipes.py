"""Rules of a recipe's own fields: contradictions that no Megatron argument shows.

A question is asked about the recipe itself, and sentences name its fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cppmega.host.wording import counted
from cppmega.rules.rule import Rule

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
_SET = "--set FIELD=VALUE, or the recipe's file"

Found = Iterator[Mapping[str, object]]


def _rule(
    concerns: str, when: Callable[[Any], object], what: str, why: str, cure: str = _SET
) -> Rule:
    return Rule(concerns=concerns, when=when, what=what, why=why, cure=cure)


def _requires(concerns: str, what: str, when: Callable[[Any], bool], *names: str) -> Rule:
    """A part of the model that has sizes without a default."""

    def missing(recipe: Any) -> object:
        unset = [name for name in names if getattr(recipe, name) is None] if when(recipe) else []
        return unset and {"unset": ", ".join(unset)}

    return _rule(concerns, missing, f"{what} need {{unset}}.", "They have no default.")


def _loop(recipe: Any) -> bool:
    return bool(recipe.kind == "loop")


def _has_experts(recipe: Any) -> bool:
    return "E" in recipe.layout.letters


def _forbidden(recipe: Any) -> Found:
    for argument in recipe.arguments:
        name = argument.partition("=")[0]
        if name in FORBIDDEN:
            yield {"argument": name, "instead": FORBIDDEN[name]}


def _mixers_without_sizes(recipe: Any) -> Found:
    for letter, *parts in (("M", "mamba2", "mamba3"), ("R", "m2rnn")):
        if letter in recipe.layout.letters and not any(getattr(recipe, part) for part in parts):
            yield {"letter": letter, "parts": " or ".join(parts)}


def _contradictory_sizes(part: str) -> Callable[[Any], object]:
    def problem(recipe: Any) -> object:
        sizes = getattr(recipe, part)
        return sizes is not None and sizes.problem and {"problem": sizes.problem}

    return problem


def _unaligned(recipe: Any) -> Found:
    multiple = 16 if recipe.precision == "fp8" else 8
    for name in _WIDTHS if not _loop(recipe) else ():
        width = getattr(recipe, name)
        if width is not None and width % multiple:
            better = -(-width // multiple) * multiple
            yield {"field": name, "width": width, "multiple": multiple, "better": better}


def _stages_do_not_divide(recipe: Any) -> bool:
    return bool(recipe.kind != "hybrid" and recipe.num_layers % recipe.stages)


def _marks_differ(recipe: Any) -> object:
    """Whether a hybrid model's layers do not form as many stages as the recipe has."""
    if recipe.kind != "hybrid":
        return False
    marked = recipe.layout.stages
    if marked == recipe.stages:
        how = "has an empty stage"
        return "" in recipe.layers_by_stage and {"how": how}
    return {"how": f"marks {marked} stages" if marked > 1 else "does not divide evenly"}


def _incomplete_groups(recipe: Any) -> object:
    """Whether the interleaved schedule gets micro-batches that do not fill its last group."""
    ranks, count = recipe.pipeline_model_parallel_size, recipe.micro_batches
    if recipe.virtual_pipeline_model_parallel_size == 1 or not count % ranks:
        return False
    more = recipe.global_batch_size // count * (count + ranks - count % ranks)
    return {"count": counted(count, "micro-batch", "micro-batches"), "ranks": ranks, "more": more}


def _gpus_do_not_split(recipe: Any) -> object:
    model = recipe.tensor_model_parallel_size * recipe.pipeline_model_parallel_size
    gpus = counted(recipe.gpus, "GPU")
    return max(recipe.gpus, 1) % model and {"model": model, "counted": gpus}


def _uneven_shares(recipe: Any) -> Found:
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if getattr(recipe, name) % recipe.tensor_model_parallel_size:
            yield {"field": name}


def _unknown_architectures(recipe: Any) -> Found:
    for name in recipe.architectures:
        if not re.fullmatch(r"sm_\d{2,3}", name):
            yield {"architecture": repr(name)}


def _unreadable_versions(recipe: Any) -> Found:
    if not recipe.stack:
        return
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # every command would wait

    for name, versions in recipe.stack:
        try:
            SpecifierSet(versions)
        except InvalidSpecifier:
            yield {"package": name, "versions": repr(versions)}


_OF_FIELDS: tuple[Rule, ...] = (
    _rule(
        "arguments",
        _forbidden,
        "it holds {argument}.",
        "Switched-off NaN checks, mock data and loss-scaled fp16 have each hidden a broken run "
        "behind a good throughput.",
        "{instead}",
    ),
    _rule(
        "names",
        lambda recipe: not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", recipe.name),
        "{name!r} is not a valid name.",
        "Run folders are named after it, and it is typed in commands.",
        "letters, digits, - and _, in the recipe and in the name of its file",
    ),
    _rule(
        "names",
        lambda recipe: bool(recipe.cut) != ("cut" in recipe.name.split("_")),
        "cut={cut!r} does not go with its name.",
        "Numbers of a part of a model must not be taken for those of the whole.",
        "a name with the word cut for a recipe with the field cut, and for no other",
    ),
    _rule(
        "the stack",
        _unknown_architectures,
        "{architecture} is not a CUDA architecture (expected e.g. sm_90).",
        "No GPU would match it.",
    ),
    _rule(
        "the stack",
        _unreadable_versions,
        "stack: {package} {versions} is not a version specifier (PEP 440, e.g. >=2.11).",
        "No installed version could be compared with it.",
    ),
)
_OF_LAYERS: tuple[Rule, ...] = (
    _rule(
        "layers",
        lambda recipe: recipe.kind == "hybrid" and (recipe.num_layers or recipe.mtp_num_layers),
        "a hybrid recipe sets num_layers or mtp_num_layers.",
        "Both are counted from the pattern; two sources can disagree.",
        "--set num_layers=0 --set mtp_num_layers=0",
    ),
    _rule(
        "layers",
        lambda recipe: recipe.kind != "hybrid" and recipe.pattern,
        "a {kind} recipe has a pattern.",
        "Only hybrid models are built from one.",
        "--set kind=hybrid, or --set pattern=",
    ),
    _rule(
        "layers",
        lambda recipe: recipe.kind != "hybrid" and not recipe.num_layers,
        "num_layers=0.",
        "A model has at least one layer.",
    ),
    _rule(
        "layers",
        lambda recipe: recipe.kind != "hybrid" and recipe.first_dense_layers > recipe.num_layers,
        "first_dense_layers={first_dense_layers} of {num_layers} layers.",
        "first_dense_layers cannot exceed num_layers.",
    ),
    _rule(
        "pipeline stages",
        lambda recipe: (
            recipe.virtual_pipeline_model_parallel_size > 1
            and recipe.pipeline_model_parallel_size == 1
        ),
        "virtual_pipeline_model_parallel_size={virtual_pipeline_model_parallel_size} without "
        "pipeline ranks.",
        "The stages of a single rank have no other rank's stages to alternate with.",
        "--set pipeline_model_parallel_size=2, or --set virtual_pipeline_model_parallel_size=1",
    ),
    _rule(
        "pipeline stages",
        _stages_do_not_divide,
        "num_layers={num_layers} does not divide into PP {pipeline_model_parallel_size} x VPP "
        "{virtual_pipeline_model_parallel_size} = {stages} stages.",
        "Every stage of a GPT has the same number of layers.",
    ),
    Rule(
        concerns="pipeline stages",
        name="bad-pattern",
        when=_marks_differ,
        what="Pattern {pattern!r} {how}, and the recipe has PP {pipeline_model_parallel_size} x "
        "VPP {virtual_pipeline_model_parallel_size} = {stages} stages.",
        why="Every rank needs the same number of stages, with a layer in each.",
        cure="one | between any two stages, or other values of pipeline_model_parallel_size and "
        "virtual_pipeline_model_parallel_size",
    ),
    _rule(
        "mixers",
        _mixers_without_sizes,
        "its pattern has {letter} without {parts}.",
        "These are the sizes of that mixer.",
    ),
    _rule(
        "mixers",
        lambda recipe: recipe.mamba2 and recipe.mamba3,
        "mamba2 and mamba3 are both set.",
        "The layers M of a model have one mixer.",
        "--set mamba2=None, or --set mamba3=None",
    ),
    _rule(
        "mixers",
        _contradictory_sizes("mamba3"),
        "mamba3 has {problem}.",
        "No kernel computes it.",
    ),
)
_OF_ATTENTION: tuple[Rule, ...] = (
    _requires(
        "MLA",
        "MLA and DSA layers",
        lambda recipe: recipe.uses_mla,
        *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    ),
    _rule(
        "MLA",
        lambda recipe: recipe.uses_mla and recipe.num_query_groups is not None,
        "num_query_groups is set with MLA.",
        "MLA has no groups.",
    ),
    _rule(
        "attention",
        lambda recipe: (
            not recipe.uses_mla
            and recipe.kv_channels is None
            and recipe.hidden_size % recipe.num_attention_heads
        ),
        "hidden_size={hidden_size} is not divisible by num_attention_heads={num_attention_heads}.",
        "A head would have a fraction of a channel.",
        "--set kv_channels=..., or another hidden_size",
    ),
    _rule(
        "DSA",
        lambda recipe: recipe.uses_dsa and recipe.kind == "gpt" and recipe.mtp_num_layers,
        "a GPT with DSA has MTP depths.",
        "Megatron's GPT builder stops on it; its hybrid builder makes the same layers.",
        "--set kind=hybrid --set pattern=D-DE/DE --set num_layers=0 --set mtp_num_layers=0",
    ),
    _requires(
        "DSA",
        "DSA layers",
        lambda recipe: recipe.uses_dsa,
        *("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
    ),
    _rule(
        "DSA",
        lambda recipe: recipe.uses_dsa and (recipe.dsa_indexer_topk or 0) > recipe.seq_length,
        "dsa_indexer_topk exceeds seq_length.",
        "Every key would be selected.",
    ),
    _rule(
        "DSA",
        lambda recipe: (
            recipe.uses_dsa
            and (recipe.dsa_indexer_head_dim or 0) < (recipe.qk_pos_emb_head_dim or 0)
        ),
        "dsa_indexer_head_dim is smaller than qk_pos_emb_head_dim.",
        "The indexer rotates that many channels of each head.",
    ),
    _rule(
        "DSA",
        lambda recipe: recipe.uses_dsa and (head := recipe.dsa_indexer_head_dim or 1) & (head - 1),
        "dsa_indexer_head_dim={dsa_indexer_head_dim} is not a power of two.",
        "The indexer's Hadamard rotation only supports powers of two.",
    ),
    _rule(
        "DSA",
        lambda recipe: recipe.dsa_dense_loss_steps and (_loop(recipe) or not recipe.uses_dsa),
        "dsa_dense_loss_steps without DSA layers that Megatron trains.",
        "No step would differ.",
        "--set dsa_dense_loss_steps=0",
    ),
    _rule(
        "DSA",
        lambda recipe: (
            recipe.dsa_dense_loss_steps
            and not (recipe.dsa_indexer_use_sparse_loss and recipe.dsa_indexer_loss_coeff > 0)
        ),
        "dsa_dense_loss_steps without a sparse indexer loss to follow.",
        "The loss would be the same in every step.",
        "--set dsa_indexer_use_sparse_loss=true, with dsa_indexer_loss_coeff above 0; or --set "
        "dsa_dense_loss_steps=0",
    ),
)
_OF_EXPERTS: tuple[Rule, ...] = (
    _requires("experts", "MoE layers", _has_experts, "num_experts", "moe_ffn_hidden_size"),
    _rule(
        "experts",
        lambda recipe: _has_experts(recipe) and recipe.moe_router_topk > (recipe.num_experts or 0),
        "moe_router_topk exceeds num_experts.",
        "There are not enough experts.",
    ),
    _rule(
        "experts",
        lambda recipe: (
            _has_experts(recipe)
            and recipe.moe_router_enable_expert_bias
            and recipe.moe_router_score_function != "sigmoid"
        ),
        "the expert bias needs sigmoid scores.",
        "Megatron refuses it.",
    ),
    _rule(
        "experts",
        lambda recipe: (
            recipe.moe_flex_dispatcher_backend and recipe.moe_token_dispatcher_type != "flex"
        ),
        "moe_flex_dispatcher_backend={moe_flex_dispatcher_backend!r} without the dispatcher flex.",
        "It would have no effect.",
        "--set moe_token_dispatcher_type=flex, or --set moe_flex_dispatcher_backend=None",
    ),
    _rule(
        "experts",
        lambda recipe: (
            recipe.moe_token_dispatcher_type == "flex"
            and recipe.moe_flex_dispatcher_backend != "hybridep"
            and recipe.tensor_model_parallel_size * recipe.expert_model_parallel_size == 1
        ),
        "DeepEP has no ranks to dispatch tokens to: TP x EP is 1.",
        "Megatron refuses it while it builds the model.",
        "--set moe_token_dispatcher_type=alltoall, or a larger expert_model_parallel_size",
    ),
    _rule(
        "experts",
        lambda recipe: (
            recipe.kind == "hybrid" and recipe.num_experts is not None and not _has_experts(recipe)
        ),
        "num_experts is set but no layer is E.",
        "It would have no effect.",
    ),
)
_OF_EMBEDDINGS: tuple[Rule, ...] = (
    _rule(
        "n-gram and structure embeddings",
        lambda recipe: recipe.adds_to_embedding and _loop(recipe),
        "ngram_hash or structure in a loop, whose model has neither.",
        "They would have no effect.",
        "--set ngram_hash=None --set structure=None",
    ),
    _rule(
        "n-gram and structure embeddings",
        _contradictory_sizes("ngram_hash"),
        "ngram_hash has {problem}.",
        "Every head of every order reads its own table.",
    ),
)
_OF_WIDTHS: tuple[Rule, ...] = (
    Rule(
        concerns="widths",
        name="width-not-aligned",
        when=_unaligned,
        what="{field}={width} is not a multiple of {multiple}.",
        why="Tensor cores process {precision} matrices in steps of {multiple}; Transformer Engine "
        "stops, or runs several times slower.",
        cure="--set {field}={better}",
    ),
)
_OF_RANKS: tuple[Rule, ...] = (
    _rule(
        "hyper-connections (--enable-mhc-connections)",
        lambda recipe: recipe.uses_mhc and _loop(recipe),
        "a loop has hyper-connections, which only Megatron's models have.",
        "mhc_connections does not support it.",
    ),
    _rule(
        "ranks",
        lambda recipe: (recipe.gpus == 0) != _loop(recipe),
        "gpus={gpus} does not go with kind={kind!r}.",
        "Only a loop, of kind 'loop', runs without a GPU.",
    ),
    _rule(
        "ranks",
        _gpus_do_not_split,
        "{counted} cannot be split into TP x PP = {model}.",
        "Every replica of the model needs TP x PP of them.",
    ),
    _rule(
        "ranks",
        lambda recipe: (
            recipe.expert_model_parallel_size > 1
            and (
                recipe.num_experts is None or recipe.num_experts % recipe.expert_model_parallel_size
            )
        ),
        "{num_experts} experts do not divide into EP {expert_model_parallel_size}.",
        "Every rank holds the same number of experts.",
    ),
    _rule(
        "ranks",
        lambda recipe: (
            recipe.data_parallel_size
            * recipe.tensor_model_parallel_size
            % recipe.expert_model_parallel_size
        ),
        "EP {expert_model_parallel_size} does not divide the {data_parallel_size} data-parallel "
        "ranks.",
        "Experts are spread over them.",
    ),
    _rule(
        "ranks",
        _uneven_shares,
        "{field} does not divide by TP {tensor_model_parallel_size}.",
        "Every rank computes an equal share.",
    ),
    _rule(
        "batches",
        lambda recipe: (
            recipe.global_batch_size % (recipe.micro_batch_size * recipe.data_parallel_size)
            and {"passes": recipe.micro_batch_size * recipe.data_parallel_size}
        ),
        "global_batch_size={global_batch_size} is not a multiple of micro_batch_size x "
        "data-parallel ranks = {micro_batch_size} x {data_parallel_size}.",
        "Some rank would get a part of a micro-batch.",
        "--set global_batch_size={passes}",
    ),
    _rule(
        "pipeline stages",
        _incomplete_groups,
        "{count} per step on {ranks} ranks with virtual stages.",
        "Megatron's interleaved schedule needs groups of as many as there are ranks.",
        "--set global_batch_size={more}",
    ),
    _rule(
        "the optimizer",
        lambda recipe: (
            recipe.overlap_param_gather
            and not (recipe.overlap_grad_reduce and recipe.use_distributed_optimizer)
        ),
        "overlap_param_gather without overlap_grad_reduce and the distributed optimizer.",
        "Megatron refuses it.",
    ),
)
_OF_TRAINING: tuple[Rule, ...] = (
    _rule(
        "loops",
        lambda recipe: _loop(recipe) and recipe.eval_interval,
        "eval_interval in a loop.",
        "A loop has its own held-out data.",
    ),
    _rule(
        "checkpoints",
        lambda recipe: (
            recipe.dist_ckpt_optim_fully_reshardable
            and (_loop(recipe) or not recipe.use_distributed_optimizer)
        ),
        "dist_ckpt_optim_fully_reshardable without Megatron's distributed optimizer.",
        "It is a format of that optimizer's states; other optimizers always save by parameter.",
        "--set dist_ckpt_optim_fully_reshardable=false",
    ),
    _rule(
        "loops",
        lambda recipe: _loop(recipe) and (recipe.async_save or recipe.keep_checkpoints),
        "async_save or keep_checkpoints in a loop.",
        "It has neither.",
    ),
    _rule(
        "precision",
        lambda recipe: recipe.precision == "fp32" and not _loop(recipe),
        "fp32 is for loops on CPU.",
        "DSA and the experts run in bf16.",
    ),
    _rule(
        "CUDA graphs",
        lambda recipe: recipe.cuda_graph_modules and recipe.cuda_graph_impl == "none",
        "cuda_graph_modules without cuda_graph_impl.",
        "Megatron accepts it and captures nothing.",
        "--set cuda_graph_impl=transformer_engine",
    ),
    _rule(
        "documents",
        lambda recipe: recipe.document_multiple > 1 and not recipe.packed_documents,
        "document_multiple without packed_documents.",
        "There is nothing to pad.",
    ),
    _rule(
        "documents",
        lambda recipe: recipe.packed_documents and recipe.seq_length % recipe.document_multiple,
        "seq_length is not a multiple of document_multiple.",
        "The last document of a pack would not fit into it.",
    ),
)

RULES: tuple[Rule, ...] = (
    *(*_OF_FIELDS, *_OF_LAYERS, *_OF_ATTENTION, *_OF_EXPERTS, *_OF_EMBEDDINGS, *_OF_WIDTHS),
    *(*_OF_RANKS, *_OF_TRAINING),
)
