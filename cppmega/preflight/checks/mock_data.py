"""The model is not trained on made-up tokens without anybody having said so."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Remark
from cppmega.training import requirements as trainer_checks

AFTER: tuple[str, ...] = ("line_parses",)

_SOURCES = (
    *("data_path", "train_data_path", "per_split_data_args_path", "data_args_path"),
    "per_dataset_sequences_path",
)


def check(context: Context) -> str:
    """Compare the line with what was asked for.

    Raises:
        CppmegaError: `mock-data-unmarked`, `mock-data-differs`.
    """
    options, args = context.line.options, context.megatron_args
    if context.recipe is not None:
        trainer_checks.check_mock_data(options, args["mock_data"])
    if args["mock_data"]:
        return Remark("MOCK DATA, as --mock-data asks: it trains faster and means nothing")
    if not any(args.get(name) for name in _SOURCES):
        raise CppmegaError(
            "mock-data-unmarked",
            "The line names no data, and does not say --mock-data.",
            "Megatron makes up tokens without a word: it trains faster and means nothing.",
            "--data PREFIX (or --data-path), or say --mock-data",
        )
    return "real data"
