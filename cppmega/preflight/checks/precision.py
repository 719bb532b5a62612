"""The line states its precision, and it is the recipe's."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Remark
from cppmega.training import requirements

AFTER: tuple[str, ...] = ("line_parses",)


def check(context: Context) -> str:
    """Read the precision of the parsed line.

    Raises:
        CppmegaError: `precision-not-stated`, `precision-differs`.
    """
    args = context.megatron_args
    if context.recipe is not None:
        requirements.check_precision(context.recipe, args)
    if context.adds_arguments and not (args.bf16 or args.fp16 or args.fp8):
        return Remark("the line states none: unless the script does, Megatron trains in fp32")
    if not (args.bf16 or args.fp16 or args.fp8):
        raise CppmegaError(
            "precision-not-stated",
            "The line has neither --bf16 nor --fp16 nor --fp8-format.",
            "Megatron then trains in fp32, several times slower, which no one asked for.",
            "add --bf16",
        )
    stated = [name for name in ("bf16", "fp16") if getattr(args, name)]
    return ", ".join([*stated, *([f"fp8 {args.fp8}"] if args.fp8 else [])])
