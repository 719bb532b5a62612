"""The line says its precision, and it is the recipe's."""

from __future__ import annotations

from types import SimpleNamespace

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.training import requirements as trainer_checks

AFTER: tuple[str, ...] = ("line_parses",)


def check(context: Context) -> str:
    """Look at what the parser made of the line.

    Raises:
        CppmegaError: `precision-not-stated`, `precision-differs`.
    """
    args = SimpleNamespace(**context.megatron_args)
    if context.recipe is not None:
        trainer_checks.check_precision(context.recipe, args)
    if not (args.bf16 or args.fp16 or args.fp8):
        raise CppmegaError(
            "precision-not-stated",
            "The line has neither --bf16 nor --fp16 nor --fp8-format.",
            "Megatron then trains in fp32, several times slower, and nobody asked for it.",
            "add --bf16",
        )
    said = [n for n in ("bf16", "fp16") if getattr(args, n)] + (
        [f"fp8 {args.fp8}"] * bool(args.fp8)
    )
    return ", ".join(said)
