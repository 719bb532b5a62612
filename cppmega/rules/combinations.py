"""Which features of a run go with which options: one table of parts, options and reasons.

The table in docs/combinations.md is written from it. A combination that it does not list is
supported, or refused by Megatron itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cppmega.host import env
from cppmega.rules.rule import Part, Rule, unsupported
from cppmega.sizes import dsa_loss, embeddings, mixers
from cppmega.sizes import megatron_args as args


def _graphs(*kinds: str, of: str = "") -> Callable[[Any], str]:
    """How CUDA graphs are captured, if it is in one of these ways and of this part of layers."""

    def asked(run: Any) -> str:
        how = args.cuda_graphs(run)
        wanted = how in kinds if kinds else how != "none"
        return how if wanted and (not of or args.captures(run, of)) else ""

    return asked


def _backend(name: str) -> Callable[[Any], bool]:
    """Whether a run's DSA layers have this backend."""
    return lambda run: args.uses_dsa(run) and run.dsa_kernel_backend == name


# What a run may have.
MHC = Part(
    "hyper-connections (--enable-mhc-connections)",
    lambda run: run.enable_mhc_connections,
    "train with one residual stream",
)
MIXERS = Part(
    "Mamba-3 and M2RNN layers",
    args.has_own_mixers,
    "train a pattern without the letters M and R",
)
MAMBA3 = Part(
    "Mamba-3 layers",
    lambda run: mixers.mamba3(run.cppmega_variables) is not None,
    "train a pattern without the letter M",
)
M2RNN = Part(
    "M2RNN layers",
    lambda run: mixers.m2rnn(run.cppmega_variables) is not None,
    "train a pattern without the letter R",
)
CLIPPED_M2RNN = Part(
    "the clipped gradients of M2RNN layers",
    lambda run: (sizes := mixers.m2rnn(run.cppmega_variables)) and sizes.gradient_clipping,
    "set gradient_clipping=None in the recipe's field m2rnn",
)
EMBEDDINGS = Part(
    "n-gram and structure embeddings",
    lambda run: embeddings.asked_for(run.cppmega_variables),
    "train with --set ngram_hash=None --set structure=None",
)
SHARED_KEYS = Part(
    "DSA layers that share keys",
    args.shares_dsa_keys,
    f"let every layer choose its own: unset {env.INDEX_CACHE.name}, or --dsa-indexer-topk-freq 1",
)
DENSE_STEPS = Part(
    f"the dense steps of DSA's indexer ({dsa_loss.GATE})",
    lambda run: args.uses_dsa(run) and dsa_loss.is_on(run.cppmega_variables),
    f"unset {dsa_loss.GATE} (--set dsa_dense_loss_steps=0) and apply again",
)
EXPERT_OVERLAP = Part(
    "--overlap-moe-expert-parallel-comm",
    lambda run: run.overlap_moe_expert_parallel_comm,
    "leave out --overlap-moe-expert-parallel-comm; `cppmega explain "
    "--overlap-moe-expert-parallel-comm` shows what else there is",
)
CUDNN_DSA = Part("the DSA backend cudnn", _backend("cudnn"), "--dsa-kernel-backend none")
TILELANG_DSA = Part("the DSA backend tilelang", _backend("tilelang"), "--dsa-kernel-backend none")
LINEAR_LOSS = Part(
    "--cross-entropy-fusion-impl linear",
    lambda run: run.cross_entropy_loss_fusion and run.cross_entropy_fusion_impl == "linear",
    "--cross-entropy-fusion-impl native",
)
CUDA_GRAPHS_OF_LAYERS = Part("CUDA graphs", _graphs(), "--cuda-graph-impl none")

# What it may ask for, where that is more than an argument.
CONTEXT_PARALLEL = Part("--context-parallel-size", lambda run: (run.context_parallel_size or 1) > 1)
FSDP = Part("FSDP (--use-megatron-fsdp, --use-torch-fsdp2)", args.uses_fsdp, "use Megatron's DDP")
FP32 = Part("fp32", lambda run: not (run.bf16 or run.fp16), "--bf16")
NOT_BF16 = Part("a dtype other than bf16", lambda run: not run.bf16, "--bf16")
DELAYED_FP8 = Part(
    "--fp8-recipe delayed",
    lambda run: run.fp8 and run.fp8_recipe == "delayed",
    "--fp8-recipe tensorwise",
)
CUDA_GRAPHS = Part("--cuda-graph-impl {}", _graphs(), "--cuda-graph-impl none")
WHOLE_STEP_GRAPHS = Part(
    "--cuda-graph-impl full_iteration", _graphs("full_iteration"), "--cuda-graph-impl none"
)
EXPERT_GRAPHS = Part(
    "--cuda-graph-impl local of MoE layers",
    lambda run: (
        args.has_experts(run)
        and any(args.captures(run, part) for part in ("moe", "moe_router", "moe_preprocess"))
        and _graphs("local")(run)
    ),
    "--cuda-graph-impl transformer_engine or none",
)
GRAPHS_WITH_DROPOUT = Part(
    "--cuda-graph-impl {} with --hidden-dropout",
    lambda run: run.hidden_dropout and _graphs("local", "transformer_engine")(run),
    "--hidden-dropout 0",
)
GRAPHS_OF_RECOMPUTED_STREAMS = Part(
    "--cuda-graph-impl {} with --recompute-modules mhc",
    lambda run: args.recomputes(run, "mhc") and _graphs("local", "transformer_engine")(run),
    "--cuda-graph-impl none",
)
MAMBA_GRAPHS = Part(
    "--cuda-graph-impl {} of Mamba layers",
    _graphs("transformer_engine", "full_iteration", of="mamba"),
    "--cuda-graph-impl local or none, or name other parts of layers in --cuda-graph-modules",
)
GRAPHS_OF_ONE_ATTENTION = Part(
    "--cuda-graph-impl {} of single attention layers",
    _graphs("local", "transformer_engine", of="attn"),
    "--cuda-graph-impl none, or name other parts of layers than attn",
)
GRAPHS_OF_SOME_LAYERS = Part(
    "--cuda-graph-impl local of {}, which capture the attention of only some layers,",
    args.captures_some_layers,
    "--cuda-graph-impl transformer_engine or none",
)
LAYOUT_WITH_MTP = Part(
    "--pipeline-model-parallel-layout with MTP depths",
    lambda run: args.mtp_depths(run) and run.pipeline_model_parallel_layout,
)
TP_OVERLAP_WITH_MTP = Part(
    "--tp-comm-overlap with MTP depths", lambda run: args.mtp_depths(run) and run.tp_comm_overlap
)
SEVERAL_DEPTHS = Part(
    "more than one MTP depth", lambda run: args.mtp_depths(run) > 1, "train one MTP depth"
)
HYBRID = Part("a hybrid model", args.layer_pattern, "train a GPT model")
RECOMPUTED_MLP = Part(
    "--recompute-modules mhc mlp",
    lambda run: args.recomputes(run, "mhc") and args.recomputes(run, "mlp"),
    "name only one of the two in --recompute-modules",
)
FUSED_UNDER_FSDP = Part(
    "--use-megatron-fsdp with --use-fused-mhc and the fusion of gradient accumulation",
    lambda run: run.use_megatron_fsdp and run.use_fused_mhc and run.gradient_accumulation_fusion,
    "--no-gradient-accumulation-fusion",
)
OFFLOADED_GRAPHS = Part(
    "activation offloading with --cuda-graph-impl {}",
    lambda run: (run.fine_grained_activation_offloading or run.cpu_offloading) and _graphs()(run),
    "--cuda-graph-impl none",
)
OFFLOADED_NORMS = Part(
    "--offload-modules attn_norm or mlp_norm with --recompute-modules mhc",
    lambda run: (
        run.fine_grained_activation_offloading
        and args.recomputes(run, "mhc")
        and {"attn_norm", "mlp_norm"} & {*(run.offload_modules or ())}
    ),
    "name other modules in --offload-modules",
)
PACKED_DOCUMENTS = Part(
    "packed_documents",
    lambda run: run.recipe is not None and run.recipe.packed_documents,
    "--set packed_documents=false",
)
TRAINED_GRAPHS = Part(
    "CUDA graphs of a recipe",
    lambda run: run.recipe is not None and CUDA_GRAPHS.used(run),
    "--set cuda_graph_impl=none",
)
DROPLESS_EXPERTS = Part(
    "the capture of complete MoE layers whose experts drop no tokens",
    lambda run: (
        args.has_experts(run)
        and _graphs("local", "transformer_engine", of="moe")(run)
        and not (run.moe_expert_capacity_factor and run.moe_pad_expert_input_to_capacity)
    ),
    "--set \"cuda_graph_modules=('attn', 'moe_router')\"",
)
DENSE_LOSS = Part(
    "the indexer's loss over all keys",
    lambda run: run.dsa_indexer_loss_coeff and not run.dsa_indexer_use_sparse_loss,
    "--dsa-indexer-use-sparse-loss",
)
DENSE_LOSS_OF_PARTS = Part(
    "the indexer's loss over all keys with context parallelism",
    lambda run: DENSE_LOSS.used(run) and CONTEXT_PARALLEL.used(run),
    "--dsa-indexer-use-sparse-loss",
)
CUDNN_WITHOUT_DENSE_LOSS = Part(
    "--dsa-kernel-backend cudnn with context parallelism or shared keys",
    lambda run: CUDNN_DSA.used(run) and (CONTEXT_PARALLEL.used(run) or args.shares_dsa_keys(run)),
    "--dsa-kernel-backend none",
)
UNFUSED_ATTENTION = Part(
    "--attention-backend unfused", lambda run: str(run.attention_backend).endswith("unfused")
)

_NOT_INITIALIZED = "Their weights would not be initialized."

UNSUPPORTED: Mapping[Part, Mapping[Part | str, str]] = {
    MHC: {
        "--use-torch-fsdp2": "It shards one type of parameters; the mapping's stay fp32.",
        FUSED_UNDER_FSDP: "The kernels add the mapping's gradient to a buffer that FSDP manages.",
        "--use-precision-aware-optimizer": "It never updates its copy of an fp32 parameter.",
        "--init-model-with-meta-device": "The mapping is initialized when the module is built.",
        WHOLE_STEP_GRAPHS: "It has not been tested.",
        EXPERT_GRAPHS: (
            "A router's local graph passes on one residual, and complete MoE layers are untested."
        ),
        GRAPHS_WITH_DROPOUT: "No graph can repeat its random numbers in the backward pass.",
        GRAPHS_OF_RECOMPUTED_STREAMS: (
            "What has to be recomputed is noted for each microbatch by code that no graph replays."
        ),
        OFFLOADED_GRAPHS: "It has not been tested.",
        OFFLOADED_NORMS: "The input of a norm would be recomputed, and kept on the host as well.",
        "--fp4-format": "Layers in FP4 have not been tested.",
        "--fp32-residual-connection": "The streams have the type of the model.",
        EXPERT_OVERLAP: "Its schedule calls the parts of a layer, not the layer.",
        "--inference-fuse-tp-communication": "It adds a single residual inside its own kernel.",
        "--heterogeneous-layers-config-path": "Layers that lack a sub-layer have not been tested.",
        "--mtp-detach-heads": "A depth reads the streams, not the hidden states that it detaches.",
        "--mtp-hsm": "A depth reads the streams, not the hidden states that it mixes.",
        TP_OVERLAP_WITH_MTP: "Its buffers have no name for the two projections of an MTP depth.",
        LAYOUT_WITH_MTP: (
            "An MTP depth needs the streams of the decoder's last layer in its own stage."
        ),
        RECOMPUTED_MLP: "Both would recompute the input of the sub-layer.",
        SHARED_KEYS: (
            "Layers that share keys are found by their names, which differ for wrapped layers."
        ),
    },
    MIXERS: {
        FSDP: "It has not been tested with parameters that stay fp32.",
        "--use-mup": "How the mixers' learning rates scale with the width has not been derived.",
        "--init-model-with-meta-device": _NOT_INITIALIZED,
        "--fp32-residual-connection": "It has not been tested.",
        MAMBA_GRAPHS: "Of these mixers, only Megatron's own graphs (local) have been tested.",
    },
    M2RNN: {
        "--fp4-format": "The width of M2RNN's projection is not a multiple of 16.",
        DELAYED_FP8: "One context is around all layers, and M2RNN's stay in bf16.",
    },
    CLIPPED_M2RNN: {"--fp16": "Gradients times the scale of the loss would be clipped."},
    EMBEDDINGS: {
        FSDP: "The copy of the MTP stage would get a part of the gradient of another part.",
        "--use-mup": "How their learning rates scale with the width has not been derived.",
        EXPERT_OVERLAP: "Its schedule calls the MTP depths without their tokens' context.",
        WHOLE_STEP_GRAPHS: (
            "The graph replays copies of the tokens, and what is attached to them is not copied."
        ),
        LAYOUT_WITH_MTP: (
            "The copies of the parameters are expected in the first and in the last stage."
        ),
        "--init-model-with-meta-device": _NOT_INITIALIZED,
    },
    DENSE_STEPS: {
        CUDA_GRAPHS: "A captured step replays its own loss: the indexer would keep the dense one.",
        CUDNN_WITHOUT_DENSE_LOSS: "This backend has no dense loss there.",
    },
    EXPERT_OVERLAP: {
        SEVERAL_DEPTHS: "Megatron's combined 1F1B schedule, which overlaps it, supports one depth.",
        HYBRID: "It has no `build_schedule_plan`, which Megatron calls in the first step.",
    },
    CUDNN_DSA: {
        NOT_BF16: "Every rank would stop when it builds its first DSA layer.",
        DENSE_LOSS_OF_PARTS: "Every rank would stop when it builds its first DSA layer.",
        UNFUSED_ATTENTION: "Megatron runs unfused, and the run would be recorded as fused.",
    },
    TILELANG_DSA: {
        FP32: "Every rank would stop when it builds its first DSA layer.",
        UNFUSED_ATTENTION: "Megatron runs unfused, and the run would be recorded as fused.",
    },
    LINEAR_LOSS: {
        "--defer-embedding-wgrad-compute": (
            "The gradient of the head's weight is computed together with the loss."
        ),
        "--logits-save-dir": "The logits are never computed.",
        "--logits-load-dir": "The logits are never computed.",
        "--config-logger-dir": "Megatron would write logits there, which are not computed.",
    },
    CUDA_GRAPHS_OF_LAYERS: {
        PACKED_DOCUMENTS: (
            "The lengths of a pack's documents change from step to step, and a graph takes only "
            "tensors of fixed shapes: Megatron would end the run at its first step."
        ),
        DROPLESS_EXPERTS: (
            "The number of tokens per expert changes from step to step, and is known only to the "
            "GPU; the host has to wait for it, which no graph can do."
        ),
    },
    CONTEXT_PARALLEL: {
        PACKED_DOCUMENTS: "The mask by which DSA is told of padding is not split over ranks.",
        TRAINED_GRAPHS: "Capturing layers whose ranks exchange tokens has not been tested.",
    },
}
"""By part: each option that it does not support, and the reason. A string is an argument."""

SHARED_KEYS_OUTSIDE_STACKS: Mapping[Part | str, str] = {
    GRAPHS_OF_SOME_LAYERS: (
        "A replayed layer cannot pass its keys to one that is not captured, nor take them from it."
    ),
    EXPERT_OVERLAP: "A layer could not tell which microbatch's keys are its own.",
}
"""For the pages that pass keys from layer to layer through their stack."""

SHARED_KEYS_IN_GRAPHS: Mapping[Part | str, str] = {
    GRAPHS_OF_ONE_ATTENTION: (
        "Layers are captured without their stack, through which a Shared layer finds the keys of "
        "its Full layer."
    ),
}
"""Further, where captured layers do not carry the keys."""

RULES: tuple[Rule, ...] = tuple(
    rule for part, options in UNSUPPORTED.items() for rule in unsupported(part, options)
)
