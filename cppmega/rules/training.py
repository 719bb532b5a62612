"""Rules of precision, of checks and of data: what a run must not claim without doing it."""

from __future__ import annotations

from typing import Any

from cppmega.rules.rule import Part, Table, stated

_SOURCES = (
    *("data_path", "train_data_path", "per_split_data_args_path", "data_args_path"),
    "per_dataset_sequences_path",
)


def _nan_checks_off(run: Any) -> bool:
    named = "check_for_nan_in_loss_and_grad" in run and not run.check_for_nan_in_loss_and_grad
    return named and not run.is_own_loop  # which looks at its losses itself


def _precision_differs(run: Any) -> bool:
    return not run.bf16 or (run.fp8 is not None) != (run.recipe.precision == "fp8")


def _heads_not_aligned(run: Any) -> object:
    heads = (run.num_attention_heads or 0) // (run.tensor_model_parallel_size or 1)
    return run.fp8 and heads % 8 and {"heads": heads}


_TABLE: Table = {
    "checks of NaN": {
        "The NaN checks of loss and gradient are off.": (
            _nan_checks_off,
            "A run full of NaN gradients looks like a fast one.",
            "leave out whatever switches them off",
            "nan-checks-off",
        ),
    },
    Part("precision", lambda run: None not in (run.recipe, run.words)): {
        "Recipe {recipe.name} declares {recipe.precision}; the arguments mean bf16={bf16}, "
        "fp16={fp16}, fp8={fp8}.": (
            _precision_differs,
            "The result would be filed under a precision it did not have.",
            "--set precision=..., or recipe.with_(precision=...), instead of an argument",
            "recipe-differs",
        ),
    },
    Part("precision", lambda run: run.words is not None): {
        "The line has neither --bf16 nor --fp16 nor --fp8-format.": (
            lambda run: not (run.bf16 or run.fp16 or run.fp8),
            "Megatron then trains in fp32, several times slower, which no one asked for.",
            "add --bf16",
            "precision-not-stated",
        ),
    },
    Part("FP8", lambda run: run.recipe is not None): {  # others train what the engine pads
        "FP8 has {heads} attention heads per rank, which is not a multiple of 8.": (
            _heads_not_aligned,
            "Transformer Engine refuses such matrices, or pads them, which is slow.",
            "--bf16 without --fp8-format (--set precision=bf16), or another number of heads",
            "width-not-aligned",
        ),
    },
    Part("context parallelism", lambda run: run.recipe is not None): {
        "Recipe {recipe.name} has CP {recipe.context_parallel_size}; the arguments mean "
        "--context-parallel-size {context_parallel_size}.": (
            lambda run: (run.context_parallel_size or 1) != run.recipe.context_parallel_size,
            "The trainer splits sequences by the recipe, and every rank would train on all of one.",
            "--set context_parallel_size=..., instead of an argument",
            "recipe-differs",
        ),
    },
    Part("data", lambda run: None not in (run.recipe, run.trainer)): {
        "--mock-data is {trainer.mock_data} for the trainer and {mock_data} for Megatron.": (
            lambda run: bool(run.mock_data) != run.trainer.mock_data,
            "Results must name their data.",
            "pass --mock-data only to the trainer",
            "recipe-differs",
        ),
    },
    Part("data", lambda run: run.trainer is not None): {
        "The line names neither data nor --mock-data.": (
            lambda run: not run.mock_data and not any(getattr(run, name) for name in _SOURCES),
            "Megatron silently makes up tokens: it trains faster, and the losses mean nothing.",
            "--data PREFIX (or --data-path), or --mock-data",
            "no-data",
        ),
    },
}

RULES = stated(_TABLE)
