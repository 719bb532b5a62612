"""The fused mHC kernels, where a launch asks for them, support its streams on this GPU.

A run whose kernels cannot run stops when its model is built, on every rank. What decides it is
known before: the number and the width of the streams, the GPU, and whether Triton is installed.
"""

from __future__ import annotations

from argparse import Namespace

from cppmega.errors import CppmegaError
from cppmega.preflight.ask import ask
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable
from cppmega.preflight.messages import ConnectionsAnswer, ConnectionsOrder

AFTER: tuple[str, ...] = ("gpus", "line_parses")
ENABLED = ("enable_mhc_connections", "enable_hyper_connections")
"""The switch in 0.20 and in dev, where the number of streams is `num_residual_streams`."""


def check(context: Context) -> str:
    """Ask the ops in a separate process.

    Raises:
        CppmegaError: `no-kernel`.
        NotApplicable: the launch uses no fused kernels of mHC, or no GPU.
    """
    args = context.megatron_args
    if not any(getattr(args, name, False) for name in ENABLED):
        raise NotApplicable("the model has one residual stream")
    if not getattr(args, "use_fused_mhc", False):
        raise NotApplicable("the hyper-connections are not fused")
    if not context.devices.found:
        raise NotApplicable("torch finds no GPU, and no recipe needs one")
    streams = getattr(args, "mhc_num_residual_streams", None) or args.num_residual_streams
    width = args.hidden_size
    order = ConnectionsOrder(device="cuda", dtype=_dtype(args), streams=streams, width=width)
    worker = "cppmega.preflight.workers.mhc_kernels"
    why = ask(worker, order, ConnectionsAnswer, context.rank_environment).reason
    if why is not None:
        raise CppmegaError(
            "no-kernel",
            f"--use-fused-mhc, but the kernels do not support {streams} streams of {width}: {why}.",
            "Every rank would stop when it builds the model.",
            "--set use_fused_mhc=False (without a recipe, leave --use-fused-mhc out), or change "
            "what is named",
        )
    return f"{streams} streams of {width}"


def _dtype(args: Namespace) -> str:
    """The type of the streams, which is the model's."""
    if args.bf16:
        return "bfloat16"
    return "float16" if args.fp16 else "float32"
