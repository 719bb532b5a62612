"""Arguments that Megatron accepts silently and that have no effect without another one.

Months of "CUDA graph" measurements had no CUDA graph in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cppmega.rules.questions import (
    cuda_graphs,
    has_experts,
    layer_pattern,
    mtp_depths,
    recomputes,
    uses_dsa,
)
from cppmega.rules.rule import Rule, Run


def _without(*names: str) -> Callable[[Run], bool]:
    """Whether all of these arguments are unset, or absent from the release."""
    return lambda run: not any(getattr(run, name) for name in names)


def _no_fused_down_projection(run: Any) -> bool:
    """Hybrid stacks build it since 0.19, for the letter of MLA, which older releases lack."""
    return bool(layer_pattern(run)) and "+" not in layer_pattern(run)


def _idle(*flags: str, where: Callable[[Any], bool], reason: str) -> Rule:
    def stated(run: Run) -> object:
        assert run.words is not None  # the rule needs them
        given = [flag for flag in flags if flag in run.words]
        return given and where(run) and {"flags": ", ".join(given)}

    return Rule(
        concerns=" ".join(flags),
        name="argument-without-effect",
        needs=("words",),
        when=stated,
        what=f"{{flags}} has no effect here: {reason}.",
        why="The run would be mistaken for one that has it.",
        cure="leave it out, or add the argument that it needs",
    )


RULES: tuple[Rule, ...] = (
    _idle(
        *("--cuda-graph-scope", "--cuda-graph-modules"),
        where=lambda run: cuda_graphs(run) == "none",
        reason="no CUDA graph is captured without --cuda-graph-impl",
    ),
    _idle(
        "--recompute-modules",
        where=lambda run: run.recompute_granularity != "selective",
        reason="it is only read with --recompute-granularity selective",
    ),
    _idle(
        *("--recompute-method", "--recompute-num-layers"),
        where=lambda run: not recomputes(run),
        reason="they are only read with --recompute-granularity full",
    ),
    _idle(
        *("--fp8-recipe", "--fp8-margin", "--fp8-amax-history-len", "--fp8-amax-compute-algo"),
        where=_without("fp8"),
        reason="FP8 is not used without --fp8-format",
    ),
    _idle(
        *("--dsa-kernel-backend", "--dsa-indexer-topk"),
        where=lambda run: not uses_dsa(run),
        reason="no layer is DSA",
    ),
    _idle(
        *("--moe-router-topk", "--moe-ffn-hidden-size", "--moe-grouped-gemm"),
        "--moe-aux-loss-coeff",
        where=lambda run: not has_experts(run),
        reason="there are no experts without --num-experts",
    ),
    _idle(
        *("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--v-head-dim"),
        where=_without("multi_latent_attention"),
        reason="they are only read with --multi-latent-attention",
    ),
    _idle(
        "--mla-down-proj-fusion",
        where=_no_fused_down_projection,
        reason="a hybrid model fuses the down projections of its MLA layers (+, since 0.19) only",
    ),
    _idle(
        "--num-query-groups",
        where=_without("group_query_attention"),
        reason="it is only read with --group-query-attention",
    ),
    _idle(
        "--mtp-num-layers",
        where=lambda run: (
            bool(run.hybrid_layer_pattern)
            and not run.mtp_hybrid_override_pattern
            and "/" not in run.hybrid_layer_pattern
        ),
        reason="a hybrid model has the MTP depths of its --hybrid-layer-pattern, after a /",
    ),
    _idle(
        "--mtp-loss-scaling-factor",
        where=lambda run: not mtp_depths(run),
        reason="the model has no MTP depth",
    ),
    _idle(
        "--cross-entropy-fusion-impl",
        where=_without("cross_entropy_loss_fusion"),
        reason="it is only read with --cross-entropy-loss-fusion",
    ),
    _idle(
        *("--save-interval", "--async-save"),
        where=_without("save"),
        reason="nothing is saved without --save",
    ),
    _idle(
        *("--log-timers-to-tensorboard", "--log-memory-to-tensorboard"),
        "--tensorboard-log-interval",
        where=_without("tensorboard_dir"),
        reason="nothing is logged there without --tensorboard-dir",
    ),
    _idle(
        *("--wandb-exp-name", "--wandb-save-dir"),
        where=_without("wandb_project"),
        reason="nothing is logged there without --wandb-project",
    ),
    _idle(
        *("--profile-step-start", "--profile-step-end", "--profile-ranks"),
        where=_without("profile"),
        reason="nothing is profiled without --profile",
    ),
    _idle(
        *("--rotary-base", "--rotary-percent"),
        where=lambda run: run.position_embedding_type == "learned_absolute",
        reason="positions are learned unless --position-embedding-type is rope",
    ),
)
