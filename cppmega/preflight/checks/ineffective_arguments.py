"""Every argument on the line has an effect.

Megatron silently accepts many arguments that only take effect together with another one: months of
"CUDA graph" measurements had no CUDA graph in them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

from cppmega.catalogue.megatron_args import (
    cuda_graphs,
    has_experts,
    has_mtp,
    layer_pattern,
    recomputes,
    uses_dsa,
)
from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Remark, refuse

AFTER: tuple[str, ...] = ("line_parses",)


class Idle(NamedTuple):
    """Arguments that have no effect under a condition."""

    flags: tuple[str, ...]
    where: Callable[[Namespace], bool]
    reason: str


def _without(*names: str) -> Callable[[Namespace], bool]:
    """Whether all of these arguments are unset, or absent from the release."""
    return lambda args: not any(getattr(args, name, None) for name in names)


def _no_mtp(args: Namespace) -> bool:
    return not has_mtp(args) and "/" not in layer_pattern(args)


def _no_fused_down_projection(args: Namespace) -> bool:
    """Hybrid stacks build it since 0.19, for the letter of MLA, which older releases lack."""
    return bool(layer_pattern(args)) and "+" not in layer_pattern(args)


_IDLE = (
    Idle(
        ("--cuda-graph-scope", "--cuda-graph-modules"),
        lambda args: cuda_graphs(args) == "none",
        "no CUDA graph is captured without --cuda-graph-impl",
    ),
    Idle(
        ("--recompute-modules",),
        lambda args: getattr(args, "recompute_granularity", None) != "selective",
        "it is only read with --recompute-granularity selective",
    ),
    Idle(
        ("--recompute-method", "--recompute-num-layers"),
        lambda args: not recomputes(args),
        "they are only read with --recompute-granularity full",
    ),
    Idle(
        ("--fp8-recipe", "--fp8-margin", "--fp8-amax-history-len", "--fp8-amax-compute-algo"),
        _without("fp8"),
        "FP8 is not used without --fp8-format",
    ),
    Idle(
        ("--dsa-kernel-backend", "--dsa-indexer-topk"),
        lambda args: not uses_dsa(args),
        "no layer is DSA",
    ),
    Idle(
        (
            "--moe-router-topk",
            "--moe-ffn-hidden-size",
            "--moe-grouped-gemm",
            "--moe-aux-loss-coeff",
        ),
        lambda args: not has_experts(args),
        "there are no experts without --num-experts",
    ),
    Idle(
        ("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--v-head-dim"),
        _without("multi_latent_attention"),
        "they are only read with --multi-latent-attention",
    ),
    Idle(
        ("--mla-down-proj-fusion",),
        _no_fused_down_projection,
        "a hybrid model fuses the down projections of its MLA layers (+, since 0.19) only",
    ),
    Idle(
        ("--num-query-groups",),
        _without("group_query_attention"),
        "it is only read with --group-query-attention",
    ),
    Idle(("--mtp-loss-scaling-factor",), _no_mtp, "the model has no MTP depth"),
    Idle(
        ("--cross-entropy-fusion-impl",),
        _without("cross_entropy_loss_fusion"),
        "it is only read with --cross-entropy-loss-fusion",
    ),
    Idle(
        ("--save-interval", "--async-save"),
        _without("save"),
        "nothing is saved without --save",
    ),
    Idle(
        (
            "--log-timers-to-tensorboard",
            "--log-memory-to-tensorboard",
            "--tensorboard-log-interval",
        ),
        _without("tensorboard_dir"),
        "nothing is logged there without --tensorboard-dir",
    ),
    Idle(
        ("--wandb-exp-name", "--wandb-save-dir"),
        _without("wandb_project"),
        "nothing is logged there without --wandb-project",
    ),
    Idle(
        ("--profile-step-start", "--profile-step-end", "--profile-ranks"),
        _without("profile"),
        "nothing is profiled without --profile",
    ),
    Idle(
        ("--rotary-base", "--rotary-percent"),
        lambda args: getattr(args, "position_embedding_type", None) == "learned_absolute",
        "positions are learned unless --position-embedding-type is rope",
    ),
)


def check(context: Context) -> str:
    """Compare the arguments on the line with the parsed ones.

    Raises:
        CppmegaError: `argument-without-effect`.
    """
    line, args = context.launch_line, context.megatron_args
    found = [
        f"{', '.join(flag for flag in idle.flags if line.has(flag))} has no effect here: "
        f"{idle.reason}"
        for idle in _IDLE
        if line.has(*idle.flags) and idle.where(args)
    ]
    if found and context.adds_arguments:
        return Remark(f"unless the script reads or sets more, {'; '.join(found)}")
    refuse(
        CppmegaError(
            "argument-without-effect",
            f"{what}.",
            "The run would be mistaken for one that has it.",
            "leave it out, or add the argument that it needs",
        )
        for what in found
    )
    return "no argument without effect is known"
