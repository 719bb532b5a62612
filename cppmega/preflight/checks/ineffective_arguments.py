"""Every argument on the line does something.

Megatron takes many of them without a word where another argument is missing that would make them
count: months of "CUDA graph" numbers had no CUDA graph in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import refuse

AFTER: tuple[str, ...] = ("line_parses",)

Args = Mapping[str, Any]


class Idle(NamedTuple):
    """Arguments that do nothing where something holds."""

    flags: tuple[str, ...]
    where: Callable[[Args], bool]
    reason: str


def _no_graphs(args: Args) -> bool:
    old = args.get("enable_cuda_graph") or args.get("external_cuda_graph")
    return args.get("cuda_graph_impl") in (None, "none") and not old


def _not_dsa(args: Args) -> bool:
    pattern = args.get("hybrid_layer_pattern") or ""
    return args.get("experimental_attention_variant") != "dsa" and "D" not in pattern


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
        "it is read with --recompute-granularity selective alone",
    ),
    Idle(
        ("--recompute-method", "--recompute-num-layers"),
        lambda a: a.get("recompute_granularity") != "full",
        "they are read with --recompute-granularity full alone",
    ),
    Idle(
        ("--fp8-recipe", "--fp8-margin", "--fp8-amax-history-len", "--fp8-amax-compute-algo"),
        lambda a: not a.get("fp8"),
        "nothing is FP8 without --fp8-format",
    ),
    Idle(("--dsa-kernel-backend", "--dsa-indexer-topk"), _not_dsa, "no layer is DSA"),
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
        "they are read with --multi-latent-attention alone",
    ),
    Idle(
        ("--num-query-groups",),
        lambda a: not a.get("group_query_attention"),
        "it is read with --group-query-attention alone",
    ),
    Idle(("--mtp-loss-scaling-factor",), _no_mtp, "the model has no MTP depth"),
    Idle(
        ("--cross-entropy-fusion-impl",),
        lambda a: not a.get("cross_entropy_loss_fusion"),
        "it is read with --cross-entropy-loss-fusion alone",
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
        "positions are learned without --position-embedding-type rope",
    ),
)


def check(context: Context) -> str:
    """Compare the words of the line with what the parser made of it.

    Raises:
        CppmegaError: `argument-without-effect`.
    """
    line, args = context.line, context.megatron_args
    refuse(
        CppmegaError(
            "argument-without-effect",
            f"{', '.join(flag for flag in idle.flags if line.has(flag))} does nothing here: "
            f"{idle.reason}.",
            "The run would be taken for one that has it.",
            "leave it out, or add what makes it count",
        )
        for idle in _IDLE
        if line.has(*idle.flags) and idle.where(args)
    )
    return "no argument without effect is known"
