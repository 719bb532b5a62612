"""Overlapped expert communication is not combined with two MTP depths."""

from __future__ import annotations

from cppmega.catalogue.megatron_args import layer_pattern
from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable

AFTER: tuple[str, ...] = ("line_parses",)


def check(context: Context) -> str:
    """Count the MTP depths of the parsed line.

    Raises:
        CppmegaError: `expert-overlap-with-mtp`.
    """
    args = context.megatron_args
    if not getattr(args, "overlap_moe_expert_parallel_comm", False):
        raise NotApplicable("expert communication is not overlapped")
    depths = max(getattr(args, "mtp_num_layers", None) or 0, layer_pattern(args).count("/"))
    if depths > 1:
        raise CppmegaError(
            "expert-overlap-with-mtp",
            f"--overlap-moe-expert-parallel-comm with {depths} MTP depths.",
            "Megatron's combined 1F1B schedule, which overlaps it, supports one depth.",
            "leave out --overlap-moe-expert-parallel-comm, or train one MTP depth",
        )
    return f"{depths} MTP depths"
