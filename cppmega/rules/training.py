"""Rules of precision, of checks and of data: what a run must not claim without doing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cppmega.rules.rule import Part, Table, stated

_SOURCES = (
    *("data_path", "train_data_path", "per_split_data_args_path", "data_args_path"),
    "per_dataset_sequences_path",
)


def _nan_checks_off(run: Any) -> bool:
    named = "check_for_nan_in_loss_and_grad" in run and not run.check_for_nan_in_loss_and_grad
    return named and not run.is_own_loop  # which looks at its losses itself


def _differs(run: Any) -> Iterator[Mapping[str, object]]:
    """What the arguments mean other than the recipe, by which the trainer works."""
    if run.words is not None and (
        not run.bf16 or (run.fp8 is not None) != (run.recipe.precision == "fp8")
    ):
        meant = f"bf16={run.bf16}, fp16={run.fp16}, fp8={run.fp8}"
        yield {"field": "precision", "stated": run.recipe.precision, "meant": meant}
    size = run.context_parallel_size or 1
    if size != (stated := run.recipe.context_parallel_size):
        yield {"field": "context_parallel_size", "stated": stated, "meant": size}
    if run.trainer is not None and bool(run.mock_data) != run.trainer.mock_data:
        yield {"field": "mock_data", "stated": run.trainer.mock_data, "meant": run.mock_data}


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
    Part("recipes", lambda run: run.recipe is not None): {
        "Recipe {recipe.name} is trained with {field}={stated}; the arguments mean {meant}.": (
            _differs,
            "The trainer works, and files its result, by the recipe.",
            "--set {field}=..., or for mock data the trainer's --mock-data, instead of an argument",
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
