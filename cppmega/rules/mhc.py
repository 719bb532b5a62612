"""Rules of hyper-connections (mHC), beyond the options that they do not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cppmega.ops.common.mhc_streams import STREAMS
from cppmega.rules.combinations import MHC
from cppmega.rules.questions import recomputes
from cppmega.rules.rule import Part, Table, destination, stated

HEAD = "hc_head_fn"
"""The weight of the learned contraction, which earlier forms of mHC lack."""

_LEAST = {
    "--mhc-num-residual-streams": 1,
    "--mhc-sinkhorn-iterations": 1,
    "--mhc-init-gating-factor": 0,
    "--mhc-recompute-layer-num": 1,
}
_NO_EFFECT = "argument-without-effect"
_OTHER_MODEL = "checkpoint-of-another-model"
_ANOTHER = "Loaded into this model, it would define a different one, or keys would be missing."


def _below(option: str, least: int) -> Callable[[Any], object]:
    return lambda run: (value := getattr(run, destination(option))) is not None and value < least


def _is_enabled(run: Any) -> object:
    return MHC.used(run) or run.enable_hyper_connections  # Megatron's own, of dev and 0.20


def _not_fused(run: Any) -> object:
    """Whether the fused kernels do not support the streams."""
    streams = run.mhc_num_residual_streams or run.num_residual_streams
    wrong = streams not in (None, *STREAMS) or (run.hidden_size or 8) % 8
    return run.use_fused_mhc and _is_enabled(run) and wrong and {"streams": streams}


def _was_saved(run: Any) -> bool:
    return any("hyper_connection" in name for name in run.saved)


def _saved_streams(run: Any) -> int | None:
    """The number of streams that the contraction of a checkpoint reads, if it has a learned one."""
    return next((shape[0] for name, shape in run.saved.items() if name.endswith(HEAD)), None)


def _other_streams(run: Any) -> object:
    streams, saved = run.mhc_num_residual_streams, _saved_streams(run)
    return saved and streams not in (None, saved) and {"saved": saved}


_TABLE: Table = {
    MHC.name: {
        "mhc is to be recomputed, but --enable-mhc-connections is missing.": (
            lambda run: recomputes(run, "mhc") and not MHC.used(run),
            "A model with one residual stream has no module of that name.",
            "--enable-mhc-connections, or another list of --recompute-modules",
            _NO_EFFECT,
        ),
        "--use-fused-mhc was given without --enable-mhc-connections.": (
            lambda run: run.use_fused_mhc and not _is_enabled(run),
            "The kernels would have nothing to compute.",
            "--enable-mhc-connections, or leave --use-fused-mhc out",
            _NO_EFFECT,
        ),
        "The fused kernels do not support {streams} streams of {hidden_size}.": (
            _not_fused,
            f"They are built for {', '.join(map(str, STREAMS))} streams of a multiple of 8.",
            "another number of streams, or --set use_fused_mhc=False (without a recipe, leave "
            "--use-fused-mhc out)",
        ),
        "The checkpoint is that of a model with hyper-connections.": (
            lambda run: _was_saved(run) and not MHC.used(run),
            _ANOTHER,
            "resume with --enable-mhc-connections, or from another checkpoint",
            _OTHER_MODEL,
        ),
    },
    MHC: {
        f"{option} is {{{destination(option)}}}, below {least}.": (
            _below(option, least),
            "Such hyper-connections are not defined.",
            f"another value of {option}",
        )
        for option, least in _LEAST.items()
    },
    Part(MHC.name, lambda run: run.saved and MHC.used(run)): {
        "The checkpoint is that of a model with one residual stream.": (
            lambda run: not _was_saved(run),
            _ANOTHER,
            "resume without --enable-mhc-connections, or from another checkpoint",
            _OTHER_MODEL,
        ),
        "The checkpoint is that of a model whose streams end in their mean (main of August 2026, "
        "or dev before June).": (
            lambda run: _was_saved(run) and _saved_streams(run) is None,
            "It mixes streams by another matrix: loaded here, it would define another model.",
            "resume with the Megatron that saved it, or from another checkpoint",
            _OTHER_MODEL,
        ),
        "The checkpoint is that of a model with {saved} streams, not {mhc_num_residual_streams}.": (
            _other_streams,
            _ANOTHER,
            "--mhc-num-residual-streams {saved}, or another checkpoint",
            _OTHER_MODEL,
        ),
    },
}

RULES = stated(_TABLE)
