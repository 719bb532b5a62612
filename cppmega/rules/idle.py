"""Arguments that Megatron accepts silently and that have no effect without another one.

Months of "CUDA graph" measurements had no CUDA graph in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cppmega.rules.rule import Rule
from cppmega.sizes import megatron_args as args

_NEEDED = {
    "--fp8-recipe --fp8-margin --fp8-amax-history-len --fp8-amax-compute-algo": "--fp8-format",
    "--moe-router-topk --moe-ffn-hidden-size --moe-grouped-gemm --moe-aux-loss-coeff": (
        "--num-experts"
    ),
    "--q-lora-rank --kv-lora-rank --qk-head-dim --v-head-dim": "--multi-latent-attention",
    "--num-query-groups": "--group-query-attention",
    "--cross-entropy-fusion-impl": "--cross-entropy-loss-fusion",
    "--save-interval --async-save": "--save",
    "--log-timers-to-tensorboard --log-memory-to-tensorboard --tensorboard-log-interval": (
        "--tensorboard-dir"
    ),
    "--wandb-exp-name --wandb-save-dir": "--wandb-project",
    "--profile-step-start --profile-step-end --profile-ranks": "--profile",
}
"""Arguments that are not read without another one."""


def _no_stated_depth(run: Any) -> bool:
    pattern = run.hybrid_layer_pattern
    return bool(pattern) and not run.mtp_hybrid_override_pattern and "/" not in pattern


_UNREAD: dict[str, tuple[Callable[[Any], bool], str]] = {
    "--cuda-graph-scope --cuda-graph-modules": (
        lambda run: args.cuda_graphs(run) == "none",
        "no CUDA graph is captured without --cuda-graph-impl",
    ),
    "--recompute-modules": (
        lambda run: run.recompute_granularity != "selective",
        "it is only read with --recompute-granularity selective",
    ),
    "--recompute-method --recompute-num-layers": (
        lambda run: not args.recomputes(run),
        "it is only read with --recompute-granularity full",
    ),
    "--dsa-kernel-backend --dsa-indexer-topk": (
        lambda run: not args.uses_dsa(run),
        "no layer is DSA",
    ),
    "--softmax-type --window-size --window-attn-skip-freq": (
        lambda run: args.uses_dsa(run) and not {"*", "+"} & {*args.layer_pattern(run)},
        "no attention but DSA's is in the model, which never reads it",
    ),
    "--mla-down-proj-fusion": (
        # Hybrid stacks build it since 0.19, for the letter of MLA, which older releases lack.
        lambda run: args.layer_pattern(run) != "" and "+" not in args.layer_pattern(run),
        "a hybrid model fuses the down projections of its MLA layers (+, since 0.19) only",
    ),
    "--mtp-num-layers": (
        _no_stated_depth,
        "a hybrid model has the MTP depths of its --hybrid-layer-pattern, after a /",
    ),
    "--mtp-loss-scaling-factor": (
        lambda run: not args.mtp_depths(run),
        "the model has no MTP depth",
    ),
    "--rotary-base --rotary-percent": (
        lambda run: run.position_embedding_type == "learned_absolute",
        "positions are learned unless --position-embedding-type is rope",
    ),
}
"""Others: when they are not read, and the reason."""


def _rule(flags: str, unread: Callable[[Any], bool], reason: str) -> Rule:
    def given(run: Any) -> object:
        named = [flag for flag in flags.split() if flag in (run.words or ())]
        return named and unread(run) and {"flags": ", ".join(named)}

    return Rule(
        when=given,
        what=f"{{flags}} has no effect here: {reason}.",
        why="The run would be mistaken for one that has it.",
        cure="leave it out, or add the argument that it needs",
        name="argument-without-effect",
        concerns=flags,
    )


def _needs(flag: str) -> tuple[Callable[[Any], bool], str]:
    name = args.destination(flag)
    return lambda run: not getattr(run, name), f"it is only read with {flag}"


_UNREAD |= {flags: _needs(needed) for flags, needed in _NEEDED.items()}
RULES = tuple(_rule(flags, *row) for flags, row in _UNREAD.items())
