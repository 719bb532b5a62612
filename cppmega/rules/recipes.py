"""Rules of a recipe's own fields: contradictions that no Megatron argument shows.

A question is asked about the recipe itself, and sentences name its fields.
"""

from __future__ import annotations

import math
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


_SIZES = {
    "MLA and DSA layers": (
        "+D",
        ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    ),
    "DSA layers": ("D", ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")),
    "MoE layers": ("E", ("num_experts", "moe_ffn_hidden_size")),
    "M2RNN layers": ("R", ("m2rnn",)),
}
"""By kind of layer: its letters, and the fields that it needs and that have no default."""

_NEEDS: Mapping[str, tuple[Mapping[str, object], str]] = {
    "num_layers": ({"pattern": ""}, "The pattern counts them, and two sources can disagree."),
    "mtp_num_layers": ({"pattern": ""}, "The pattern counts them, and two sources can disagree."),
    "pattern": ({"kind": "hybrid"}, "Only hybrid models are built from one."),
    "mamba2": ({"mamba3": None}, "The layers M of a model have one mixer."),
    "num_query_groups": ({"uses_mla": False}, "MLA has no groups."),
    "dsa_dense_loss_steps": ({"uses_dsa": True}, "No step would differ."),
    "moe_router_enable_expert_bias": (
        {"moe_router_score_function": "sigmoid"},
        "Megatron refuses it.",
    ),
    "moe_flex_dispatcher_backend": (
        {"moe_token_dispatcher_type": "flex"},
        "It would have no effect.",
    ),
    "overlap_param_gather": (
        {"overlap_grad_reduce": True, "use_distributed_optimizer": True},
        "Megatron refuses it.",
    ),
    "dist_ckpt_optim_fully_reshardable": (
        {"use_distributed_optimizer": True},
        "It is a format of that optimizer's states; other optimizers always save by parameter.",
    ),
    "document_multiple": ({"packed_documents": True}, "There is nothing to pad."),
}
"""By field: what a recipe that sets it must have, and why."""

_OF_MEGATRON = (
    *("ngram_hash", "structure", "mhc_num_residual_streams", "dsa_dense_loss_steps"),
    *("eval_interval", "async_save", "keep_checkpoints", "dist_ckpt_optim_fully_reshardable"),
    *("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"),
)
"""Fields that no loop reads."""

_AT_MOST = (
    ("first_dense_layers", "num_layers", "There are not so many layers."),
    ("moe_router_topk", "num_experts", "There are not enough experts."),
    ("dsa_indexer_topk", "seq_length", "Every key would be selected."),
    ("qk_pos_emb_head_dim", "dsa_indexer_head_dim", "The indexer rotates as many channels."),
)
"""A field, the field that it must not exceed, and why."""

_TP, _CP = "tensor_model_parallel_size", "context_parallel_size"
_PP, _VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
_MULTIPLES = (
    ("gpus", (_TP, _CP, _PP), "Every replica of the model needs as many."),
    ("num_layers", (_PP, _VPP), "Every stage of a GPT has the same number of layers."),
    ("num_attention_heads", (_TP,), "Every rank computes an equal share."),
    ("ffn_hidden_size", (_TP,), "Every rank computes an equal share."),
    ("num_experts", ("expert_model_parallel_size",), "Every rank holds equally many experts."),
    (
        "global_batch_size",
        ("micro_batch_size", "data_parallel_size"),
        "No rank may get a part of a micro-batch.",
    ),
    ("seq_length", ("document_multiple",), "The last document of a pack would not fit into it."),
)
"""A field, those of whose product it must be a multiple, and why."""


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


def _without_sizes(letters: str, names: tuple[str, ...]) -> Callable[[Any], object]:
    def unset(recipe: Any) -> object:
        missing = [name for name in names if getattr(recipe, name) is None]
        return {*letters} & {*recipe.layout.letters} and missing and {"unset": ", ".join(missing)}

    return unset


def _set_to(recipe: Any, field: str) -> Mapping[str, object]:
    """The default of a field that a recipe sets to something else, for sentences; else empty."""
    default = type(recipe).__dataclass_fields__[field].default
    return {"default": default} if getattr(recipe, field) != default else {}


def _words(needed: Mapping[str, object]) -> str:
    return " and ".join(f"{name}={value!r}" for name, value in needed.items())


def _in_a_loop(field: str) -> Callable[[Any], object]:
    return lambda recipe: _is_loop(recipe) and _set_to(recipe, field)


def _lacks(field: str, needed: Mapping[str, object]) -> Callable[[Any], object]:
    return lambda recipe: (
        any(getattr(recipe, name) != value for name, value in needed.items())
        and _set_to(recipe, field)
    )


def _exceeds(field: str, limit: str) -> Callable[[Any], object]:
    return lambda recipe: (
        None not in (value := getattr(recipe, field), most := getattr(recipe, limit))
        and value > most
    )


def _no_multiple(field: str, factors: tuple[str, ...]) -> Callable[[Any], object]:
    def remainder(recipe: Any) -> object:
        value = getattr(recipe, field) or 0
        multiple = math.prod(getattr(recipe, factor) for factor in factors)
        better = -(-value // multiple) * multiple
        return value % multiple and {"multiple": multiple, "better": better}

    return remainder


def _contradictory(recipe: Any) -> Iterator[Mapping[str, str]]:
    for name in ("mamba3", "ngram_hash"):
        sizes = getattr(recipe, name)
        if sizes is not None and sizes.problem:
            yield {"field": name, "problem": sizes.problem}


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
    "ranks": {
        "gpus={gpus} is not supported with kind={kind!r}.": (
            lambda recipe: (recipe.gpus == 0) != _is_loop(recipe),
            "Only a loop, of kind 'loop', runs without a GPU.",
        ),
    },
    "fields": {
        **{
            f"{layers} need {{unset}}.": (_without_sizes(*row), "Such sizes have no default.")
            for layers, row in _SIZES.items()
        },
        **{
            f"{field}={{{field}!r}} in a loop.": (
                _in_a_loop(field),
                "Only models that Megatron trains have it.",
                f"--set {field}={{default}}",
            )
            for field in _OF_MEGATRON
        },
        **{
            f"{field}={{{field}!r}} needs {_words(needed)}.": (
                _lacks(field, needed),
                reason,
                f"--set {field}={{default}}, or a recipe with {_words(needed)}",
            )
            for field, (needed, reason) in _NEEDS.items()
        },
        **{
            f"{field}={{{field}}} exceeds {limit}={{{limit}}}.": (_exceeds(field, limit), reason)
            for field, limit, reason in _AT_MOST
        },
        **{
            f"{field}={{{field}}} is not a multiple of {' x '.join(factors)} = {{multiple}}.": (
                _no_multiple(field, factors),
                reason,
                f"--set {field}={{better}}, or other values of {' and '.join(factors)}",
            )
            for field, factors, reason in _MULTIPLES
        },
        "{field} has {problem}.": (_contradictory, "No kernel computes it."),
    },
    Part("layers of hybrid models", _is_hybrid): {
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
        "num_layers=0.": (
            lambda recipe: not recipe.num_layers,
            "A model has at least one layer.",
        ),
    },
    "mixers": {
        "its pattern has M without mamba2 or mamba3.": (
            lambda recipe: _has("M")(recipe) and not (recipe.mamba2 or recipe.mamba3),
            "These are the sizes of that mixer.",
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
        "dsa_indexer_head_dim={dsa_indexer_head_dim} is not a power of two.": (
            lambda recipe: (head := recipe.dsa_indexer_head_dim or 1) & (head - 1),
            "The indexer's Hadamard rotation only supports powers of two.",
        ),
    },
    "the token dispatcher": {
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
    "expert parallelism": {
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
}

RULES = stated(_TABLE, cure="--set FIELD=VALUE, or the recipe's file")
