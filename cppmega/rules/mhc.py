"""Rules of hyper-connections (mHC), beyond the options that they do not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cppmega.ops.common.mhc_streams import STREAMS
from cppmega.rules.combinations import MHC
from cppmega.rules.rule import Table, stated
from cppmega.sizes.megatron_args import destination, recomputes

HEAD = "hc_head_fn"
"""The weight of the learned contraction, which earlier forms of mHC lack."""

_STREAMS = "--mhc-num-residual-streams"
_LEAST = {
    _STREAMS: 1,
    "--mhc-sinkhorn-iterations": 1,
    "--mhc-init-gating-factor": 0,
    "--mhc-recompute-layer-num": 1,
}
_NO_EFFECT = "argument-without-effect"


def _below(option: str, least: int) -> Callable[[Any], object]:
    return lambda run: (value := getattr(run, destination(option))) is not None and value < least


def _is_enabled(run: Any) -> object:
    return MHC.used(run) or run.enable_hyper_connections  # Megatron's own, of dev and 0.20


def _not_fused(run: Any) -> object:
    """Whether the fused kernels do not support the streams."""
    streams = run.mhc_num_residual_streams or run.num_residual_streams
    wrong = streams not in (None, *STREAMS) or (run.hidden_size or 8) % 8
    return run.use_fused_mhc and _is_enabled(run) and wrong and {"streams": streams}


def _saved_otherwise(run: Any) -> object:
    """Whether the checkpoint has other streams, and with which this run could resume from it."""
    streams = next((shape[0] for name, shape in run.saved.items() if name.endswith(HEAD)), None)
    saved = any("hyper_connection" in name for name in run.saved)
    if not MHC.used(run):
        return saved and {"streams": "hyper-connections", "cure": "--enable-mhc-connections"}
    if not saved:
        none = "resume without --enable-mhc-connections"
        return run.saved and {"streams": "one residual stream", "cure": none}
    if streams is None:  # main of August 2026, or dev before June
        mean = "streams that end in their mean, and not in a learned contraction"
        return {"streams": mean, "cure": "resume with the Megatron that saved it"}
    other = run.mhc_num_residual_streams not in (None, streams)
    return other and {"streams": f"{streams} streams", "cure": f"{_STREAMS} {streams}"}


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
        "The checkpoint is that of a model with {streams}.": (
            _saved_otherwise,
            "Loaded into this model, it would define a different one, or keys would be missing.",
            "{cure}, or another checkpoint",
            "checkpoint-of-another-model",
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
}

RULES = stated(_TABLE)
