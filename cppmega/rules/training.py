"""Rules of precision, of checks and of data: what a run must not claim without doing it."""

from __future__ import annotations

from typing import Any

from cppmega.rules.rule import Rule, Run

_SOURCES = (
    *("data_path", "train_data_path", "per_split_data_args_path", "data_args_path"),
    "per_dataset_sequences_path",
)


def _precision_differs(run: Run) -> bool:
    return not run.bf16 or (run.fp8 is not None) != (run.recipe.precision == "fp8")


def _heads_not_aligned(run: Any) -> object:
    heads = (run.num_attention_heads or 0) // (run.tensor_model_parallel_size or 1)
    return run.fp8 and heads % 8 and {"heads": heads}


RULES: tuple[Rule, ...] = (
    Rule(
        concerns="checks of NaN",
        name="nan-checks-off",
        when=lambda run: (
            "check_for_nan_in_loss_and_grad" in run
            and not run.check_for_nan_in_loss_and_grad
            and not run.is_own_loop  # which looks at its losses itself
        ),
        what="The NaN checks of loss and gradient are off.",
        why="A run full of NaN gradients looks like a fast one.",
        cure="leave out whatever switches them off",
    ),
    Rule(
        concerns="precision",
        name="precision-differs",
        needs=("recipe", "words"),
        when=_precision_differs,
        what="Recipe {recipe.name} declares {recipe.precision}; the arguments mean bf16={bf16}, "
        "fp16={fp16}, fp8={fp8}.",
        why="The result would be filed under a precision it did not have.",
        cure="--set precision=..., or recipe.with_(precision=...), instead of an argument",
    ),
    Rule(
        concerns="precision",
        name="precision-not-stated",
        needs=("words",),
        when=lambda run: not (run.bf16 or run.fp16 or run.fp8),
        what="The line has neither --bf16 nor --fp16 nor --fp8-format.",
        why="Megatron then trains in fp32, several times slower, which no one asked for.",
        cure="add --bf16",
    ),
    Rule(
        concerns="FP8",
        name="width-not-aligned",
        needs=("recipe",),  # others train what Transformer Engine pads
        when=_heads_not_aligned,
        what="FP8 has {heads} attention heads per rank, which is not a multiple of 8.",
        why="Transformer Engine refuses such matrices, or pads them, which is slow.",
        cure="--bf16 without --fp8-format (--set precision=bf16), or another number of heads",
    ),
    Rule(
        concerns="data",
        name="mock-data-differs",
        needs=("recipe", "trainer"),
        when=lambda run: bool(run.mock_data) != run.trainer.mock_data,
        what="--mock-data is {trainer.mock_data} for the trainer and {mock_data} for Megatron.",
        why="Results must name their data.",
        cure="pass --mock-data only to the trainer",
    ),
    Rule(
        concerns="data",
        name="mock-data-unmarked",
        needs=("trainer",),
        when=lambda run: not run.mock_data and not any(getattr(run, name) for name in _SOURCES),
        what="The line names neither data nor --mock-data.",
        why="Megatron silently makes up tokens: it trains faster, and the losses mean nothing.",
        cure="--data PREFIX (or --data-path), or --mock-data",
    ),
)
