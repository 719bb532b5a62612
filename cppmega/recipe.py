"""A run as data: model, parallel layout and training. Typed, frozen, additive; imports no torch.

Fields carry Megatron's own argument names where Megatron has one. A recipe changes only by
`with_` (a field by its name) and `plus` (further arguments at the end): there is no string of
default flags that could be replaced as a whole.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from cppmega import dsa_widths
from cppmega import pattern as patterns
from cppmega.errors import CppmegaError

Kind = Literal["hybrid", "gpt", "loop"]
"""`hybrid` and `gpt` run Megatron's `pretrain`; `loop` is a loop of our own, which runs on CPU."""
Precision = Literal["bf16", "fp8", "fp32"]
Activation = Literal["gelu", "squared_relu", "swiglu"]
Attention = Literal["full", "mla", "dsa"]

FORBIDDEN_ARGUMENTS = ("--no-check-for-nan-in-loss-and-grad", "--mock-data", "--fp16")
"""No recipe may hold these: NaN checks stay on, and mock data is asked for by the run alone."""


@dataclass(frozen=True, slots=True)
class Mamba3:
    """Mamba-3 MIMO mixers of the letter `M`. No Megatron release has them."""

    expand: int = 2
    head_dim: int = 64
    state_dim: int = 128
    groups: int = 8
    rank: int = 4
    chunk: int = 16
    rope_fraction: float = 0.5


@dataclass(frozen=True, slots=True)
class M2RNN:
    """Matrix-state RNN mixers of the letter `R`. No Megatron release has them."""

    key_dim: int = 64
    value_dim: int = 16
    conv: int = 4


@dataclass(frozen=True, slots=True)
class NgramHash:
    """Hashed n-gram embeddings added to the token embedding. No Megatron release has them."""

    orders: tuple[int, ...] = (2, 3)
    heads: int = 8
    tables: tuple[int, ...] = (
        *(499_801, 499_819, 499_853, 499_879, 499_883, 499_897, 499_903, 499_927),
        *(499_943, 499_957, 499_969, 499_973, 499_979, 500_009, 500_029, 500_041),
    )
    """Rows of each table, one per order and head: the 16 primes just around 500,000."""
    dim: int = 16


@dataclass(frozen=True, slots=True)
class Structure:
    """Structure and depth-level embeddings of source code. No Megatron release has them."""

    categories: int = 9
    levels: int = 16
    bottleneck: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One run. Sizes count elements of the whole model, never of one rank.

    Raises:
        CppmegaError: `recipe-invalid`, `width-not-aligned`, `bad-pattern`.
    """

    name: str
    purpose: str
    """One line for `cppmega recipes`."""
    kind: Kind
    precision: Precision
    """Never implied: a launch line that does not say it has trained the wrong one before."""
    gpus: int
    """GPUs the run takes; 0 for a loop that runs on CPU."""

    hidden_size: int
    ffn_hidden_size: int
    """Width of the dense MLP (letter `-`, or a GPT layer without experts)."""
    num_attention_heads: int
    seq_length: int
    vocab_size: int
    """Token ids the model has rows for, before padding to `make_vocab_size_divisible_by`."""
    make_vocab_size_divisible_by: int = 128
    pattern: str = ""
    """Letters of a hybrid model: D DSA, + MLA, * attention, E MoE, - MLP, M Mamba-3, R M2RNN;
    `/` starts an MTP depth, `|` a pipeline stage."""
    num_layers: int = 0
    """GPT and loop; a hybrid model counts its pattern."""
    mtp_num_layers: int = 0
    """GPT and loop; a hybrid model counts its pattern."""
    attention: Attention = "full"
    """GPT and loop; a hybrid model has it in its pattern."""
    first_dense_layers: int = 0
    """GPT with experts: leading layers that have a dense MLP instead."""
    kv_channels: int | None = None
    num_query_groups: int | None = None
    activation: Activation = "gelu"
    position_embedding_type: Literal["rope", "none"] = "rope"
    rotary_base: int = 10_000
    norm_epsilon: float = 1e-5
    init_method_std: float = 0.02
    tied_embeddings: bool = False

    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    qk_layernorm: bool = False
    """Norms of MLA's low-rank query and key-value, or of a GPT's query and key heads."""

    dsa_indexer_n_heads: int | None = None
    dsa_indexer_head_dim: int | None = None
    dsa_indexer_topk: int | None = None
    dsa_indexer_loss_coeff: float = 0.0
    dsa_indexer_use_sparse_loss: bool = False
    dsa_kernel_backend: Literal["none", "tilelang", "cudnn"] | None = None
    """Not said: Megatron's unfused default, which a preflight refuses; `none` says it is meant."""

    num_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_aux_loss_coeff: float = 0.0
    moe_grouped_gemm: bool = True
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "alltoall"

    mamba3: Mamba3 | None = None
    m2rnn: M2RNN | None = None
    ngram_hash: NgramHash | None = None
    structure: Structure | None = None

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False

    micro_batch_size: int = 1
    """Sequences per rank and pass."""
    global_batch_size: int = 1
    """Sequences per optimizer step, over all ranks."""
    train_iters: int = 100
    lr: float = 1e-4
    lr_decay_style: Literal["constant", "cosine", "linear"] = "constant"
    lr_warmup_iters: int = 0
    min_lr: float = 0.0
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    clip_grad: float = 1.0
    seed: int = 1234
    mtp_loss_scaling_factor: float = 0.1
    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise"] = "tensorwise"
    recompute_modules: tuple[str, ...] = ()
    """Megatron's selective recompute; empty: nothing is recomputed."""
    cross_entropy_loss_fusion: bool = True
    cross_entropy_fusion_impl: Literal["native", "linear"] = "native"
    """linear: the heads' losses without logits, by our patches; see `needed_patches`."""
    cuda_graph_impl: Literal["none", "local", "transformer_engine"] = "none"
    cuda_graph_modules: tuple[str, ...] = ()

    packed_documents: bool = False
    """Attention, Mamba and MTP stay inside a document; off: a sample is one causal sequence."""
    document_multiple: int = 1
    """Packed: pad each document inside the pack to a multiple of this many tokens."""

    patches: tuple[str, ...] = ()
    """Pages of `upstream_patches/` without which the run must not start."""
    gates: tuple[tuple[str, str], ...] = ()
    """`CPPMEGA_*` variables that must have this value."""
    environment: tuple[tuple[str, str], ...] = ()
    """Other variables, set by the trainer where they are not set yet."""
    architectures: tuple[str, ...] = ()
    """GPUs that the sizes and kernels were chosen for, as sm_90; empty: any."""
    stack: tuple[tuple[str, str], ...] = ()
    """Distribution, or `cuda`, and the versions of it that the run was made for, as pip says it."""
    accepted_edits: tuple[tuple[str, str], ...] = ()
    """Files of Megatron that the team edited itself, below ROOT, and the SHA-256 of each."""
    arguments: tuple[str, ...] = ()
    """Further Megatron arguments, added by `plus`; rendered last."""

    def __post_init__(self) -> None:
        _check_types(self)
        _check(self)

    def with_(self, **changes: Any) -> Recipe:
        """The same recipe with some fields changed.

        Raises:
            CppmegaError: `unknown-field` with the nearest name, or what construction raises.
        """
        known = {field.name for field in fields(self)} - {"arguments"}
        for name in changes:
            if name == "arguments":
                raise CppmegaError(
                    "unknown-field",
                    "Recipe.arguments cannot be replaced.",
                    "A replaced list of flags drops the ones that were there without a word.",
                    "-- --flag value adds to it; in Python: recipe.plus('--flag', 'value')",
                )
            if name not in known:
                near = difflib.get_close_matches(name, sorted(known), n=1)
                raise CppmegaError(
                    "unknown-field",
                    f"Recipe has no field {name}." + (f" Did you mean {near[0]}?" if near else ""),
                    "The change would do nothing.",
                    f"--set {near[0]}=..." if near else "the fields are those of cppmega/recipe.py",
                )
        return replace(self, **changes)

    def plus(self, *arguments: str) -> Recipe:
        """The same recipe with further Megatron arguments.

        Raises:
            CppmegaError: `recipe-invalid` for an argument no recipe may hold.
        """
        return replace(self, arguments=(*self.arguments, *arguments))

    @property
    def layout(self) -> patterns.Pattern:
        """The layers of the model, whichever kind it is."""
        if self.kind == "hybrid":
            return patterns.parse(self.pattern)
        letter = {"full": "*", "mla": "+", "dsa": "D"}[self.attention]
        dense = self.first_dense_layers if self.num_experts else self.num_layers
        main = (letter + "-") * dense + (letter + "E") * (self.num_layers - dense)
        return patterns.Pattern(main, main[-2:] if self.mtp_num_layers else "", self.mtp_num_layers)

    @property
    def needed_patches(self) -> tuple[str, ...]:
        """`patches`, and those that make a value of a field mean something."""
        needed = [*self.patches]
        if self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "linear":
            head = "linear_ce_hybrid_head" if self.kind == "hybrid" else "linear_ce_gpt_head"
            needed += ["cross_entropy_fusion_linear", head]
            needed += ["mtp_linear_ce"] if self.layout.depths else []
        backend, widths = self.dsa_kernel_backend, dsa_widths.of(self)
        if self.uses_dsa and widths not in dsa_widths.taken(backend, patched=False):
            needed += [dsa_widths.PATCH] if widths in dsa_widths.taken(backend, True) else []
        return tuple(dict.fromkeys(needed))

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different data."""
        model = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return max(self.gpus, 1) // model

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head."""
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple

    @property
    def uses_mla(self) -> bool:
        """Whether any layer is MLA or DSA."""
        return bool(set("D+") & set(self.layout.letters))

    @property
    def uses_dsa(self) -> bool:
        """Whether any layer is DSA."""
        return "D" in self.layout.letters


def invalid(
    recipe: Recipe,
    what: str,
    why: str,
    hint: str = "--set FIELD=VALUE, or the recipe's file",
) -> CppmegaError:
    """The error of a recipe that cannot be trained as it stands."""
    return CppmegaError("recipe-invalid", f"Recipe {recipe.name}: {what}", why, hint)


def _check_types(recipe: Recipe) -> None:
    """Words must be known, values of their type and counts positive: no typo becomes a default."""
    for name, hint in _hints().items():
        value = getattr(recipe, name)
        if not _fits(value, hint):
            words = _words(hint)
            near = difflib.get_close_matches(str(value), words, n=1)
            raise invalid(
                recipe,
                f"{name}={value!r} is {_wanted(hint)}."
                + (f" Did you mean {near[0]}?" if near else ""),
                "Megatron would refuse it, or read something else.",
            )
        if name in _POSITIVE and value is not None and value < 1:
            raise invalid(recipe, f"{name}={value!r} must be above 0.", "It counts something.")


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Recipe)


def _fits(value: object, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in inner
    if origin in (UnionType, Union):  # what a Literal makes with | is the older one of the two
        return any(_fits(value, one) for one in inner)
    if origin is tuple:
        many = inner[1:] == (...,)
        hints = inner[:1] * len(value) if many and isinstance(value, tuple) else inner
        return (
            isinstance(value, tuple) and len(value) == len(hints) and all(map(_fits, value, hints))
        )
    if isinstance(value, bool) and hint is not bool:
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def _words(hint: Any) -> tuple[str, ...]:
    """The words that a field may hold, if it holds words."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for part in get_args(hint) for word in _words(part))


def _wanted(hint: Any) -> str:
    if _words(hint):
        return "none of " + ", ".join(_words(hint))
    return "no " + (hint.__name__ if isinstance(hint, type) else str(hint))


def _check(recipe: Recipe) -> None:
    from cppmega.recipe_checks import check  # a cycle otherwise: the checks need the class

    check(recipe)


_POSITIVE = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "vocab_size"),
    *("kv_channels", "num_query_groups", "make_vocab_size_divisible_by", "rotary_base"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "document_multiple", "train_iters"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("micro_batch_size", "global_batch_size"),
)
