"""FP8 attention has a multiple of eight heads per rank."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable

AFTER: tuple[str, ...] = ("line_parses",)


def check(context: Context) -> str:
    """Count the heads of the parsed line.

    Raises:
        CppmegaError: `fp8-heads`.
    """
    args = context.megatron_args
    if not getattr(args, "fp8", None):
        raise NotApplicable("FP8 is not used")
    heads = args.num_attention_heads // args.tensor_model_parallel_size
    if heads % 8:
        raise CppmegaError(
            "fp8-heads",
            f"FP8 with {heads} attention heads per rank, which is not a multiple of 8.",
            "Transformer Engine refuses such matrices, or pads them, which is slow.",
            "--bf16 without --fp8-format, or another number of heads",
        )
    return f"{heads} heads on a rank"
