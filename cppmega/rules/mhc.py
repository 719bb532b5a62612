"""Rules of hyper-connections (mHC), beyond the options that they do not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cppmega.ops.common.mhc_streams import STREAMS
from cppmega.rules.combinations import MHC
from cppmega.rules.questions import recomputes
from cppmega.rules.rule import Rule, Run

HEAD = "hc_head_fn"
"""The weight of the learned contraction, which earlier forms of mHC lack."""

_ANOTHER = "Loaded into this model, it would define a different one, or keys would be missing."
_NOT_ENABLED = "argument-without-effect"


def _below(name: str, least: float) -> Rule:
    def is_below(run: Any) -> bool:
        value = getattr(run, name)
        return MHC.used(run) is True and value is not None and value < least

    option = f"--{name.replace('_', '-')}"
    return Rule(
        concerns=MHC.name,
        when=is_below,
        what=f"{option} is {{{name}}}, below {least:g}.",
        why="Such hyper-connections are not defined.",
        cure=f"another value of {option}",
    )


def _not_fused(run: Run) -> object:
    """Whether the fused kernels support other streams; dev and 0.20 have another switch."""
    if not (run.use_fused_mhc and (MHC.used(run) or run.enable_hyper_connections)):
        return False
    streams = run.mhc_num_residual_streams or run.num_residual_streams
    wrong = streams not in (None, *STREAMS) or (run.hidden_size or 8) % 8
    return wrong and {"streams": streams}


def _resumes(condition: Callable[[Run, bool, tuple[int, ...] | None], object]) -> Any:
    """A question about a checkpoint: whether it has streams, and the shape of its contraction."""

    def asked(run: Run) -> object:
        if not run.saved:
            return False
        has = any("hyper_connection" in name for name in run.saved)
        heads = (shape for name, shape in run.saved.items() if name.endswith(HEAD))
        return condition(run, has, next(heads, None))

    return asked


def _other_streams(run: Run, has: bool, head: tuple[int, ...] | None) -> object:
    streams = run.mhc_num_residual_streams
    return MHC.used(run) and head and streams not in (None, head[0]) and {"saved": head[0]}


RULES: tuple[Rule, ...] = (
    Rule(
        concerns=MHC.name,
        name=_NOT_ENABLED,
        when=lambda run: recomputes(run, "mhc") and not MHC.used(run),
        what="mhc is to be recomputed, but --enable-mhc-connections is missing.",
        why="A model with one residual stream has no module of that name.",
        cure="--enable-mhc-connections, or another list of --recompute-modules",
    ),
    Rule(
        concerns=MHC.name,
        name=_NOT_ENABLED,
        # Megatron's own implementation of dev and 0.20 has another switch.
        when=lambda run: run.use_fused_mhc and not (MHC.used(run) or run.enable_hyper_connections),
        what="--use-fused-mhc was given without --enable-mhc-connections.",
        why="The kernels would have nothing to compute.",
        cure="--enable-mhc-connections, or leave --use-fused-mhc out",
    ),
    _below("mhc_num_residual_streams", 1),
    _below("mhc_sinkhorn_iterations", 1),
    _below("mhc_init_gating_factor", 0),
    _below("mhc_recompute_layer_num", 1),
    Rule(
        concerns=MHC.name,
        when=_not_fused,
        what="The fused kernels do not support {streams} streams of {hidden_size}.",
        why=f"They are built for {', '.join(map(str, STREAMS))} streams of a multiple of 8.",
        cure="another number of streams, or --set use_fused_mhc=False (without a recipe, leave "
        "--use-fused-mhc out)",
    ),
    Rule(
        concerns=MHC.name,
        name="checkpoint-of-another-model",
        when=_resumes(lambda run, has, head: has and not MHC.used(run)),
        what="The checkpoint is that of a model with hyper-connections.",
        why=_ANOTHER,
        cure="resume with --enable-mhc-connections, or from another checkpoint",
    ),
    Rule(
        concerns=MHC.name,
        name="checkpoint-of-another-model",
        when=_resumes(lambda run, has, head: MHC.used(run) and not has),
        what="The checkpoint is that of a model with one residual stream.",
        why=_ANOTHER,
        cure="resume without --enable-mhc-connections, or from another checkpoint",
    ),
    Rule(
        concerns=MHC.name,
        name="checkpoint-of-another-model",
        when=_resumes(lambda run, has, head: MHC.used(run) and has and head is None),
        what="The checkpoint is that of a model whose streams end in their mean (main of August "
        "2026, or dev before June).",
        why="It mixes streams by another matrix: loaded here, it would define another model.",
        cure="resume with the Megatron that saved it, or from another checkpoint",
    ),
    Rule(
        concerns=MHC.name,
        name="checkpoint-of-another-model",
        when=_resumes(_other_streams),
        what="The checkpoint is that of a model with {saved} streams, not "
        "{mhc_num_residual_streams}.",
        why=_ANOTHER,
        cure="--mhc-num-residual-streams {saved}, or another checkpoint",
    ),
)
