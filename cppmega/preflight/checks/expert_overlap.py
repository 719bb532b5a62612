"""Overlapped expert communication is only requested where Megatron has a schedule for it."""

from __future__ import annotations

from cppmega.catalogue import decisions
from cppmega.catalogue.megatron_args import layer_pattern
from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable

AFTER: tuple[str, ...] = ("line_parses",)

FLAG = "--overlap-moe-expert-parallel-comm"


def check(context: Context) -> str:
    """Inspect the model of the parsed line, and count its MTP depths.

    Raises:
        CppmegaError: `expert-overlap-with-mtp`, `expert-overlap-in-hybrid`.
    """
    args = context.megatron_args
    if not getattr(args, "overlap_moe_expert_parallel_comm", False):
        raise NotApplicable("expert communication is not overlapped")
    depths = max(getattr(args, "mtp_num_layers", None) or 0, layer_pattern(args).count("/"))
    if depths > 1:
        raise CppmegaError(
            "expert-overlap-with-mtp",
            f"{FLAG} with {depths} MTP depths.",
            "Megatron's combined 1F1B schedule, which overlaps it, supports one depth.",
            f"leave out {FLAG}, or train one MTP depth",
        )
    if layer_pattern(args):
        (row,) = decisions.find(FLAG).values()
        raise CppmegaError(
            "expert-overlap-in-hybrid",
            f"{FLAG} with a hybrid model, which has no `build_schedule_plan`. {row.sentences()}",
            "The first step would end with an exception: Megatron asks the model for its schedule.",
            f"{row.instead}; cppmega explain {FLAG}",
        )
    return f"{depths} MTP depths"
