"""Mock data is used only if the launch requests it."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Remark
from cppmega.training import requirements

AFTER: tuple[str, ...] = ("line_parses",)

_SOURCES = (
    *("data_path", "train_data_path", "per_split_data_args_path", "data_args_path"),
    "per_dataset_sequences_path",
)


def check(context: Context) -> str:
    """Compare the parsed line with the trainer's options.

    Raises:
        CppmegaError: `mock-data-unmarked`, `mock-data-differs`.
    """
    options, args = context.launch_line.options, context.megatron_args
    if context.recipe is not None:
        requirements.check_mock_data(options, args.mock_data)
    if args.mock_data:
        return Remark("MOCK DATA, as --mock-data asks: its speed and its losses mean nothing")
    if not any(getattr(args, name, None) for name in _SOURCES):
        if context.adds_arguments:
            return Remark(
                "the line names no data that Megatron reads: unless the script has its own, "
                "Megatron makes up tokens"
            )
        raise CppmegaError(
            "mock-data-unmarked",
            "The line names neither data nor --mock-data.",
            "Megatron silently makes up tokens: it trains faster, and the losses mean nothing.",
            "--data PREFIX (or --data-path), or --mock-data",
        )
    return "real data"
