"""The benchmark of hyper-connections with CUDA graphs and FP8: what it runs, and its page."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from cppmega.recipe import index as recipes_index
from cppmega.recipe.render import render

pytest.importorskip("torch")
mhc_with = importlib.import_module("benchmarks.slices.mhc_with")


def test_every_run_has_what_its_label_says() -> None:
    for recipe, shared, labels in mhc_with.MODELS.values():
        for label, changes in labels.items():
            chosen = recipes_index.with_text(recipes_index.load(recipe), (*shared, *changes))
            argv = render(chosen, "0.19.2").argv
            assert "--use-fused-mhc" in argv
            assert ("--fp8-recipe" in argv) is label.startswith("FP8")
            assert ("--cuda-graph-impl" in argv) is ("graphs" in label)
            assert ("--cuda-graph-modules" in argv) is ("of attention" in label)


def test_a_page_compares_with_eager_runs_of_the_same_precision() -> None:
    def run(milliseconds: float, *losses: float) -> dict[str, Any]:
        steps = [[step, loss, 1.0, 0.1] for step, loss in enumerate(losses)]
        ends = {"first_loss": losses[0], "last_loss": losses[-1], "peak_gib": 9.0}
        return {"milliseconds": milliseconds, "curve": steps, **ends}

    every = {
        "eager": [run(100, 5.0, 4.0), run(102, 5.0, 4.25)],
        "local graphs of layers": [run(50.5, 5.0, 4.5)],
        "FP8, eager": [run(80, 6.0, 5.0), run(80, 6.0, 5.125)],
        "FP8, local graphs of layers": [run(40, 6.0, 4.5)],
    }
    stack = {"torch": "2.11", "gpu": "NVIDIA H200"}
    model = {"recipe": "gpt_mhc_h200", "changes": ["hidden_size=1024"], "runs": every}
    page = mhc_with.page(
        {"date": "2026-11-28", "gpus": 1, "stack": stack, "models": {"gpt": model}}
    )
    rows = {line.split(" |")[0][2:]: line for line in page.splitlines() if line.startswith("| ")}
    assert rows["eager"].endswith(
        "| 100.0, 102.0 | 1.000 | 9.00 | | 5.0000 | 4.0000 |  |  | reference |"
    )
    graphs = "| 50.5 | 0.500 | 9.00 | | 5.0000 | 4.5000 | 2.50e-01 | 2.50e-01 | within the noise |"
    assert rows["local graphs of layers"].endswith(graphs)
    assert rows["FP8, eager"].endswith("| 2.50e-01 | 1.00e+00 | reference in FP8 |")
    assert rows["FP8, local graphs of layers"].endswith(
        "| 1.25e-01 | 5.00e-01 | **beyond the noise** |"
    )
