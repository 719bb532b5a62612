"""The fields of a recipe with their types and bounds, and what follows from them, without torch.

A field has the name of Megatron's own argument where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from cppmega.errors import CppmegaError
from cppmega.host import env
from cppmega.recipe import layer_pattern as patterns
from cppmega.sizes import dsa_loss
from cppmega.sizes import stated as environment_sizes
from cppmega.sizes.embeddings import NgramHash, Structure
from cppmega.sizes.mixers import M2RNN, Mamba2, Mamba3
from cppmega.sizes.stated import Count, Positive, PositiveReal

Kind = Literal["hybrid", "gpt", "loop"]
"""`hybrid` and `gpt` run Megatron's `pretrain`; `loop` is our own loop, which runs on CPU."""
Precision = Literal["bf16", "fp8", "fp32"]
Activation = Literal["gelu", "squared_relu", "swiglu"]
Attention = Literal["full", "mla", "dsa"]

Layers = Annotated[int, Meta(ge=0, le=10_000)]
Sequences = Annotated[int, Meta(ge=1, le=2**20)]
"""The passes of a step are counted one by one."""
NonNegativeReal = Annotated[float, Meta(ge=0)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
"""Decay of a running average: at 1, it would never forget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """One run, not yet validated. Sizes are those of the complete model, never of one rank."""

    name: str
    purpose: str
    """One line for `cppmega recipes`."""
    cut: str = ""
    """The part that is left of the model that gives the recipe its name, such as `24 of 52 layers`;
    the name and every logged step state that it is cut. Empty: the whole model."""
    kind: Kind
    precision: Precision
    """No default: launch lines that did not state it have trained in the wrong precision."""
    gpus: Count
    """GPUs that the run uses; 0 for a loop, which runs on CPU."""

    hidden_size: Positive
    ffn_hidden_size: Positive
    """Width of the dense MLP (letter `-`, or a GPT layer without experts)."""
    num_attention_heads: Positive
    seq_length: Positive
    vocab_size: Positive
    """Token ids with a row in the model, before padding to `make_vocab_size_divisible_by`."""
    make_vocab_size_divisible_by: Positive = 128
    pattern: str = ""
    """Letters of a hybrid model: D DSA, + MLA, * attention, E MoE, - MLP, M Mamba, R M2RNN;
    `/` starts an MTP depth, `|` a pipeline stage."""
    num_layers: Layers = 0
    """GPT and loop; in a hybrid model the pattern determines it."""
    mtp_num_layers: Layers = 0
    """GPT and loop; in a hybrid model the pattern determines it."""
    attention: Attention = "full"
    """GPT and loop; in a hybrid model the pattern determines it."""
    first_dense_layers: Count = 0
    """GPT with experts: leading layers that have a dense MLP instead."""
    kv_channels: Positive | None = None
    num_query_groups: Positive | None = None
    activation: Activation = "gelu"
    position_embedding_type: Literal["rope", "none"] = "rope"
    rotary_base: Positive = 10_000
    norm_epsilon: PositiveReal = 1e-5
    init_method_std: PositiveReal = 0.02
    tied_embeddings: bool = False

    q_lora_rank: Positive | None = None
    kv_lora_rank: Positive | None = None
    qk_head_dim: Positive | None = None
    qk_pos_emb_head_dim: Positive | None = None
    v_head_dim: Positive | None = None
    qk_layernorm: bool = False
    """Norms of MLA's low-rank query and key-value, or of a GPT's query and key heads."""

    dsa_indexer_n_heads: Positive | None = None
    dsa_indexer_head_dim: Positive | None = None
    dsa_indexer_topk: Positive | None = None
    dsa_indexer_loss_coeff: float = 0.0
    dsa_indexer_use_sparse_loss: bool = False
    dsa_dense_loss_steps: Count = 0
    """Steps at the start that train the indexer with the dense loss before the sparse one."""
    dsa_index_pattern: str = ""
    """F (chooses keys) or S (uses those of the last F) for each DSA layer of the trunk, by the page
    `dsa_index_share`; empty: every layer chooses its own."""
    dsa_kernel_backend: Literal["none", "tilelang", "cudnn"] | None = None
    """None: Megatron's unfused default, which a preflight refuses; `none` requests it."""

    num_experts: Positive | None = None
    moe_router_topk: Positive = 2
    moe_ffn_hidden_size: Positive | None = None
    moe_shared_expert_intermediate_size: Positive | None = None
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_aux_loss_coeff: float = 0.0
    moe_grouped_gemm: bool = True
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] | None = None
    """Of the dispatcher `flex`, a package that is built on the host; None: DeepEP."""
    moe_permute_fusion: bool = False
    """Order tokens by expert and back in Transformer Engine's kernels instead of torch's."""
    moe_router_fusion: bool = False
    """Compute scores and top-k of the router in kernels of Transformer Engine."""

    mhc_num_residual_streams: Positive = 1
    """Above 1: hyper-connections (mHC) with this many streams, by the page `mhc_connections`."""
    mhc_sinkhorn_iterations: Positive = 20
    mhc_init_gating_factor: NonNegativeReal = 0.01
    mhc_recompute_layer_num: Positive | None = None
    """With `mhc` among `recompute_modules`: layers per block; None: all layers of a stage."""
    use_fused_mhc: bool = True
    """In a recipe with mHC: compute it with the fused kernels, or stop."""

    mamba2: Mamba2 | None = None
    """Sizes of the layers M, as Mamba-2, which is Megatron's own; it needs mamba-ssm."""
    mamba3: Mamba3 | None = None
    """Sizes of the layers M, as Mamba-3."""
    m2rnn: M2RNN | None = None
    """Sizes of the layers R."""
    ngram_hash: NgramHash | None = None
    structure: Structure | None = None

    tensor_model_parallel_size: Positive = 1
    context_parallel_size: Positive = 1
    """Ranks that share out the tokens of every sequence."""
    pipeline_model_parallel_size: Positive = 1
    virtual_pipeline_model_parallel_size: Positive = 1
    """Stages of each pipeline rank, by the interleaved schedule. A hybrid model takes them from the
    marks of its pattern, or where it has none, all equally long."""
    expert_model_parallel_size: Positive = 1
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    ddp_average_in_collective: bool = False
    """Let the reduction of gradients average them, instead of scaling each rank's before it."""

    micro_batch_size: Positive = 1
    """Sequences per rank and pass."""
    global_batch_size: Sequences = 1
    """Sequences per optimizer step, over all ranks."""
    train_iters: Positive = 100
    eval_interval: Count = 0
    """Steps between evaluations on held-out data, the same samples each time; 0: none."""
    eval_tokens: Positive = 2**20
    """Held-out tokens of one evaluation, rounded up to whole global batches."""
    lr: PositiveReal = 1e-4
    lr_decay_style: Literal["constant", "cosine", "linear"] = "constant"
    lr_warmup_iters: Count = 0
    min_lr: NonNegativeReal = 0.0
    weight_decay: NonNegativeReal = 0.1
    adam_beta1: Decay = 0.9
    adam_beta2: Decay = 0.95
    clip_grad: NonNegativeReal = 1.0
    gradient_accumulation_fusion: bool = False
    """Add gradients of weights to fp32 within their products, by the page
    `grad_accumulation_without_apex`."""
    async_save: bool = False
    """Write checkpoints in another process: a step waits until everything is copied, no longer."""
    dist_ckpt_optim_fully_reshardable: bool = False
    """Save the distributed optimizer's states by parameter, so that they can be loaded with other
    tensor, pipeline and expert-parallel sizes; each save gathers them. Default: by bucket."""
    keep_checkpoints: Count = 0
    """How many checkpoints stay, the newest; 0: all. An older one is removed once the newer one is
    complete, so room for one more is needed."""
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 1234
    mtp_loss_scaling_factor: float = 0.1
    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise"] = "tensorwise"
    recompute_modules: tuple[str, ...] = ()
    """Megatron's selective recompute; empty: nothing is recomputed."""
    cross_entropy_loss_fusion: bool = True
    cross_entropy_fusion_impl: Literal["native", "linear"] = "native"
    """linear: the heads' losses without logits, by our patches; see `wanted_patches`."""
    cuda_graph_impl: Literal["none", "local", "transformer_engine"] = "none"
    cuda_graph_modules: tuple[str, ...] = ()

    packed_documents: bool = False
    """Keep attention, Mamba and MTP inside a document; off: a sample is one causal sequence."""
    document_multiple: Positive = 1
    """Packed: pad each document inside the pack to a multiple of this many tokens."""

    patches: tuple[str, ...] = ()
    """Pages of `upstream_patches/` without which the run must not start."""
    allow_fallback: tuple[str, ...] = ()
    """Pages whose declined calls Megatron's own code may compute, as `--allow-fallback` does."""
    gates: tuple[tuple[str, str], ...] = ()
    """`CPPMEGA_*` variables that must have this value."""
    environment: tuple[tuple[str, str], ...] = ()
    """Other variables, set by the trainer where they are not set yet."""
    architectures: tuple[str, ...] = ()
    """GPU architectures that the sizes and kernels were chosen for, such as sm_90; empty: any."""
    stack: tuple[tuple[str, str], ...] = ()
    """Distribution, or `cuda`, and a version specifier (PEP 440) that the run needs."""
    accepted_edits: tuple[tuple[str, str], ...] = ()
    """Files of Megatron, below ROOT, that the team edited itself, each with its SHA-256."""
    arguments: tuple[str, ...] = ()
    """Further Megatron arguments, added by `plus`; rendered last."""

    @property
    def layout(self) -> patterns.Pattern:
        """The layers of the model, of whichever kind."""
        if self.kind == "hybrid":
            return patterns.parse(self.pattern).divided(self.stages)
        letter = {"full": "*", "mla": "+", "dsa": "D"}[self.attention]
        dense = self.first_dense_layers if self.num_experts else self.num_layers
        main = (letter + "-") * dense + (letter + "E") * (self.num_layers - dense)
        return patterns.Pattern(main, main[-2:] if self.mtp_num_layers else "", self.mtp_num_layers)

    @property
    def stages(self) -> int:
        """Pipeline stages of the model, virtual ones included."""
        return self.pipeline_model_parallel_size * self.virtual_pipeline_model_parallel_size

    @property
    def layers_by_stage(self) -> tuple[str, ...]:
        """The letters of every stage of the trunk; rank r has the stages r, r + PP, r + 2 PP..."""
        main = self.layout.main
        if self.kind == "hybrid":
            return tuple(main.split("|"))
        width = len(main) // self.stages
        return tuple(main[start : start + width] for start in range(0, len(main), width))

    @property
    def micro_batches(self) -> int:
        """Passes of every replica per optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        """The `CPPMEGA_*` variables that pass fields to patched code."""
        steps, pattern = self.dsa_dense_loss_steps, self.dsa_index_pattern
        letters = self.layout.letters
        stated = {
            dsa_loss.STEPS: str(steps) if steps else "",
            env.DSA_INDEX_PATTERN.name: pattern,
            env.NGRAM_HASH.name: environment_sizes.text(self.ngram_hash),
            env.STRUCTURE.name: environment_sizes.text(self.structure),
            env.MAMBA3.name: environment_sizes.text(self.mamba3 if "M" in letters else None),
            env.M2RNN.name: environment_sizes.text(self.m2rnn if "R" in letters else None),
        }
        return tuple((name, value) for name, value in stated.items() if value)

    @property
    def adds_to_embedding(self) -> bool:
        """Whether the model has further input embeddings."""
        return self.ngram_hash is not None or self.structure is not None

    @property
    def has_own_mixers(self) -> bool:
        """Whether the model has layers with mixers that no Megatron release has."""
        own = patterns.OWN - {"M"} if self.mamba2 else patterns.OWN
        return bool(own & set(self.layout.letters))

    def unknown_to(self, line: tuple[int, int]) -> list[str]:
        """Letters that no module of that Megatron release builds; every release has Mamba-2."""
        known = "M" if self.mamba2 else ""
        return [letter for letter in patterns.unknown_to(self.layout, line) if letter not in known]

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different data."""
        model = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return max(self.gpus, 1) // (model * self.context_parallel_size)

    @property
    def eval_iters(self) -> int:
        """Global batches of one evaluation; 0 where there is none."""
        batch = self.global_batch_size * self.seq_length
        return -(-self.eval_tokens // batch) if self.eval_interval else 0

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
    def dsa_widths(self) -> tuple[int, int]:
        """Widths of DSA's absorbed queries (latent and rotated part) and values (latent part)."""
        latent = self.kv_lora_rank or 0
        return latent + (self.qk_pos_emb_head_dim or 0), latent

    @property
    def uses_linear_cross_entropy(self) -> bool:
        """Whether the heads take their losses without logits."""
        return self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "linear"

    @property
    def uses_mhc(self) -> bool:
        """Whether the model has several residual streams."""
        return self.mhc_num_residual_streams > 1

    @property
    def uses_dsa(self) -> bool:
        """Whether any layer is DSA."""
        return "D" in self.layout.letters

    @property
    def indexers(self) -> int:
        """Number of DSA layers that select keys; those of MTP depths always do."""
        shared = self.dsa_index_pattern.count("S")
        return self.layout.counts()["D"] - shared

    @property
    def wanted_gates(self) -> tuple[tuple[str, str], ...]:
        """`gates`, and those without which a field has no effect."""
        shares = ((env.INDEX_CACHE.name, "1"),) if self.dsa_index_pattern else ()
        return (*shares, *self.gates)

    @property
    def uses_mamba_ssm(self) -> bool:
        """Whether mamba-ssm's kernels compute Mamba-3 layers, which our scan does not support."""
        own = self.mamba3 if "M" in self.layout.letters else None
        return own is not None and bool(own.scan_obstacle(self.hidden_size))

    @property
    def uses_mimo(self) -> bool:
        """Whether any layer runs mamba-ssm's MIMO kernels of Mamba-3, which are TileLang's."""
        return self.uses_mamba_ssm and self.mamba3 is not None and self.mamba3.rank > 1

    @property
    def uses_tilelang(self) -> bool:
        """Whether DSA runs on TileLang's kernels."""
        return self.uses_dsa and self.dsa_kernel_backend == "tilelang"


def invalid(
    recipe: Fields,
    what: str,
    why: str,
    hint: str = "--set FIELD=VALUE, or the recipe's file",
) -> CppmegaError:
    """The error of a recipe that cannot be trained as it is."""
    return CppmegaError("recipe-invalid", f"Recipe {recipe.name}: {what}", why, hint)
