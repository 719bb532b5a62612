"""Every argument on the line has an effect.

Megatron silently accepts many arguments that only count together with another one: months of
"CUDA graph" measurements had no CUDA graph in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import refuse
from cppmega.preflight.launch_line import has_dsa_layers

AFTER: tuple[str, ...] = ("line_parses",)

Args = Mapping[str, Any]


class Idle(NamedTuple):
    """Arguments that have no effect under a condition."""

    flags: tuple[str, ...]
    where: Callable[[Args], bool]
    reason: str


def _no_graphs(args: Args) -> bool:
    old = args.get("enable_cuda_graph") or args.get("external_cuda_graph")
    return args.get("cuda_graph_impl") in (None, "none") and not old


def _no_mtp(args: Args) -> bool:
    return not args.get("mtp_num_layers") and "/" not in (args.get("hybrid_layer_pattern") or "")


_IDLE = (
    Idle(
        ("--cuda-graph-scope", "--cuda-graph-modules"),
        _no_graphs,
        "no CUDA graph is captured without --cuda-graph-impl",
    ),
    Idle(
        ("--recompute-modules",),
        lambda a: a.get("recompute_granularity") != "selective",
        "it is only read with --recompute-granularity selective",
    ),
    Idle(
        ("--recompute-method", "--recompute-num-layers"),
        lambda a: a.get("recompute_granularity") != "full",
        "they are only read with --recompute-granularity full",
    ),
    Idle(
        ("--fp8-recipe", "--fp8-margin", "--fp8-amax-history-len", "--fp8-amax-compute-algo"),
        lambda a: not a.get("fp8"),
        "nothing is FP8 without --fp8-format",
    ),
    Idle(
        ("--dsa-kernel-backend", "--dsa-indexer-topk"),
        lambda a: not has_dsa_layers(a),
        "no layer is DSA",
    ),
    Idle(
        (
            "--moe-router-topk",
            "--moe-ffn-hidden-size",
            "--moe-grouped-gemm",
            "--moe-aux-loss-coeff",
        ),
        lambda a: not a.get("num_experts"),
        "there are no experts without --num-experts",
    ),
    Idle(
        ("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--v-head-dim"),
        lambda a: not a.get("multi_latent_attention"),
        "they are only read with --multi-latent-attention",
    ),
    Idle(
        ("--num-query-groups",),
        lambda a: not a.get("group_query_attention"),
        "it is only read with --group-query-attention",
    ),
    Idle(("--mtp-loss-scaling-factor",), _no_mtp, "the model has no MTP depth"),
    Idle(
        ("--cross-entropy-fusion-impl",),
        lambda a: not a.get("cross_entropy_loss_fusion"),
        "it is only read with --cross-entropy-loss-fusion",
    ),
    Idle(
        ("--save-interval", "--async-save"),
        lambda a: not a.get("save"),
        "nothing is saved without --save",
    ),
    Idle(
        (
            "--log-timers-to-tensorboard",
            "--log-memory-to-tensorboard",
            "--tensorboard-log-interval",
        ),
        lambda a: not a.get("tensorboard_dir"),
        "nothing is logged there without --tensorboard-dir",
    ),
    Idle(
        ("--wandb-exp-name", "--wandb-save-dir"),
        lambda a: not a.get("wandb_project"),
        "nothing is logged there without --wandb-project",
    ),
    Idle(
        ("--profile-step-start", "--profile-step-end", "--profile-ranks"),
        lambda a: not a.get("profile"),
        "nothing is profiled without --profile",
    ),
    Idle(
        ("--rotary-base", "--rotary-percent"),
        lambda a: a.get("position_embedding_type") == "learned_absolute",
        "positions are learned unless --position-embedding-type is rope",
    ),
)


def check(context: Context) -> str:
    """Compare the words of the line with the parsed arguments.

    Raises:
        CppmegaError: `argument-without-effect`.
    """
    line, args = context.launch_line, vars(context.megatron_args)
    refuse(
        CppmegaError(
            "argument-without-effect",
            f"{', '.join(flag for flag in idle.flags if line.has(flag))} does nothing here: "
            f"{idle.reason}.",
            "The run would be mistaken for one that has it.",
            "leave it out, or add the argument that it needs",
        )
        for idle in _IDLE
        if line.has(*idle.flags) and idle.where(args)
    )
    return "no argument without effect is known"
