"""The benchmark of context parallelism: what it runs, and its page."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from cppmega.recipe import index as recipes_index
from cppmega.recipe.render import render

pytest.importorskip("torch")
context_parallel = importlib.import_module("benchmarks.slices.context_parallel")


def test_every_run_takes_the_same_batches() -> None:
    for recipe, shared, labels in context_parallel.MODELS.values():
        steps = set()
        for label, changes in labels.items():
            chosen = recipes_index.with_text(recipes_index.load(recipe), (*shared, *changes))
            argv = render(chosen, "0.19.2").argv
            assert ("--context-parallel-size" in argv) is ("CP 2" in label)
            assert chosen.micro_batch_size * chosen.data_parallel_size == chosen.global_batch_size
            steps.add((chosen.global_batch_size, chosen.seq_length))
        assert len(steps) == 1


def test_a_curve_is_compared_with_one_gpu_and_dp() -> None:
    def run(milliseconds: float, *losses: float) -> dict[str, Any]:
        steps = [[step, loss, 1.0, 0.1] for step, loss in enumerate(losses)]
        ends = {"first_loss": losses[0], "last_loss": losses[-1], "peak_gib": 9.0}
        return {"milliseconds": milliseconds, "curve": steps, **ends}

    every = {
        context_parallel.ONE: [run(100, 5.0, 4.0)],
        context_parallel.DATA: [run(60, 5.0, 4.25)],
        context_parallel.CONTEXT: [run(75, 5.0, 4.5)],
    }
    result = {"date": "2026-11-28", "gpus": 2, "stack": {"gpu": "NVIDIA H200"}}
    model = {"recipe": "gpt_mhc_h200", "changes": [], "runs": every}
    page = context_parallel.page({**result, "models": {"mhc": model}})
    assert (
        "| two GPUs, CP 2 | 75.0 | 0.750 | 9.00 | 5.0000 | 4.5000 | 2.50e-01 | 2.50e-01 "
        "| within the noise |"
    ) in page
    assert "| one GPU | 100.0 | 1.000 | 9.00 | 5.0000 | 4.0000 |  |  | reference |" in page

    del every[context_parallel.DATA]
    assert "no two references" in context_parallel.page({**result, "models": {"mhc": model}})
