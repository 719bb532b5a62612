"""The rows of a whole recipe: what is run in which environment, and what is said of it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cppmega.recipe import index as recipes_index
from cppmega.recipe.memory import MAMBA_RECOMPUTE

rows = importlib.import_module("benchmarks.whole.rows")

WRITES = """
import json, sys
with open(sys.argv[1], "a") as file:
    file.write(json.dumps({"start": "x", "overlay": "abc", "mock_data": False}) + "\\n")
    for step in range(1, 28):
        file.write(json.dumps({
            "step": step,
            "seconds": 4096 * int(sys.argv[4]) / float(sys.argv[2]),
            "tokens_per_second": float(sys.argv[2]),
            "tflops_per_gpu": 250.0, "tflops_per_gpu_by_megatron": 200.0, "peak_gib": 110.0,
            "loss": float(sys.argv[3]) - step, "grad_norm": 1.0, "losses": {"lm loss": 11.0},
            "mock_data": False, "profiled": step > 25}) + "\\n")
"""
PRODUCTS = "NVTE_USE_CUTLASS_GROUPED_GEMM"
FULL = "import sys; sys.exit('torch.OutOfMemoryError: CUDA out of memory.')"


def test_rows_run_once_each_in_their_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[tuple[Any, ...]] = []
    left_out: list[tuple[str, ...]] = []

    def start(bench: Any, name: str, tree: Path, *options: str) -> subprocess.Popen[bytes]:
        of_environment = (os.environ.get(variable) for variable in (MAMBA_RECOMPUTE[0], PRODUCTS))
        began.append((name, tree.name, *of_environment, options[options.index("--") + 1 :]))
        tokens = "20000" if name == "recipe" else "15000"
        code = FULL if name == "heads" else WRITES
        loss = "40.5" if name == "fp8_gather" else "40.0"
        sequences = str(bench.recipe.global_batch_size)
        command = [sys.executable, "-c", code, str(bench.metrics(name)), tokens, loss, sequences]
        with (bench.out / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def header(bench: Any) -> dict[str, Any]:
        facts = {"recipe": bench.recipe.name, "date": "2026-01-01", "gpus": 2}
        return {**facts, "changes": list(bench.changes), "stack": {"gpu": "NVIDIA H200"}}

    monkeypatch.setattr(rows.Bench, "start", start)
    ended = rows.Bench.wait

    def wait(bench: Any, name: str, process: subprocess.Popen[bytes]) -> None:
        ended(bench, name, process)
        if name == "products":  # what it has done until then counts
            raise rows.TimeIsUp(name)

    monkeypatch.setattr(rows.Bench, "wait", wait)

    def tree(bench: Any, name: str, *options: str) -> Path:
        left_out.append(options)
        return tmp_path / name

    monkeypatch.setattr(rows.Bench, "tree", tree)
    monkeypatch.setattr(rows.runs, "header", header)
    monkeypatch.setenv(*MAMBA_RECOMPUTE)  # as the call of another run may have left it
    places = ("--site", "s", "--work", str(tmp_path / "w"), "--data", "d")
    arguments = [
        *places,
        "--out",
        str(tmp_path),
        "--only",
        "recipe,recomputed,products,heads,fp8_gather,dsa,alone,share",
    ]
    for _ in range(2):  # the second call finds everything done
        done = CliRunner().invoke(rows.main, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert began == [
        ("recipe", "plain", None, None, ()),
        ("recomputed", "CPPMEGA_MAMBA_RECOMPUTE=1", "1", None, ()),
        ("products", "plain", None, "0", ()),
        ("heads", "plain", None, None, ()),
        ("fp8_gather", "plain", None, None, ("--fp8-param-gather",)),
        ("dsa", "without-dsa", None, None, ()),
        ("alone", "plain", None, None, ()),
        ("share", "plain", None, None, ()),
    ]
    assert not any((*left_out[:5], *left_out[6:])) and left_out[5][::2] == ("--without",) * 3
    found = json.loads((tmp_path / "nam56r_h200_2gpu_ep2_rows.json").read_text())
    assert found["changes"] == [] and found["rows"]["products"]["changes"] == [f"{PRODUCTS}=0"]
    assert f"| products | {PRODUCTS}=0 | 25 | 7500 | 0.750 | 250 | 110.0 | " in done.output
    assert "overlap_param_gather=False | 25 | 15000 | 1.500 | " in done.output
    share = next(line for line in done.output.splitlines() if line.startswith("| share |"))
    assert "global_batch_size=8 | 25 | 15000 | 1.500 | " in share and share.endswith(" |  |  |")
    assert "cross_entropy_fusion_impl=native |  | out of memory |" in done.output
    gather, products = (
        next(line for line in done.output.splitlines() if line.startswith(f"| {name} |"))
        for name in ("fp8_gather", "products")
    )
    assert gather.endswith("| +0.5000 | 0.5000 |") and products.endswith("| +0.0000 | 0.0000 |")


@pytest.mark.parametrize("name", rows.ROWS)
def test_every_row_is_a_recipe_that_differs_from_the_first(name: str) -> None:
    row = rows.ROWS[name]
    two, four = map(recipes_index.load, ("nam56r_h200_2gpu_ep2", "nam56r_full_h200_4gpu"))
    changed = [
        recipes_index.with_text(recipe, row.of(recipe).changes) != recipe for recipe in (two, four)
    ]
    assert any(changed) is bool(row.changes)
    own = dict(two.environment)
    assert all(own.get(variable) != value for variable, value in row.variables.items())
    assert bool(row.described) is (name not in ("recipe", "again"))


@pytest.mark.parametrize("name", ["nam56r_h200_4gpu_ep4", "nam56r_h200_4gpu_tp4"])
def test_one_gpu_has_the_steps_of_a_replica(name: str) -> None:
    recipe = recipes_index.load(name)
    alone = recipes_index.with_text(recipe, rows.ROWS["share"].of(recipe).changes)
    assert alone.gpus == 1 and alone.micro_batch_size == recipe.micro_batch_size
    assert alone.micro_batches == recipe.micro_batches
