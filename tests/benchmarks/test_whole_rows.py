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
from tests.support import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
rows = importlib.import_module("whole_rows")

WRITES = """
import json, sys
with open(sys.argv[1], "a") as file:
    file.write(json.dumps({"start": "x", "overlay": "abc", "mock_data": False}) + "\\n")
    for step in range(1, 28):
        file.write(json.dumps({
            "step": step, "seconds": 0.5, "tokens_per_second": float(sys.argv[2]),
            "tflops_per_gpu": 250.0, "tflops_per_gpu_by_megatron": 200.0, "peak_gib": 110.0,
            "loss": 11.0, "grad_norm": 1.0, "losses": {"lm loss": 11.0}, "mock_data": False,
            "profiled": step > 25}) + "\\n")
"""
FULL = "import sys; sys.exit('torch.OutOfMemoryError: CUDA out of memory.')"


def test_rows_run_once_each_in_their_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[tuple[str, str, str | None]] = []

    def start(bench: Any, name: str, tree: Path, *options: str) -> subprocess.Popen[bytes]:
        began.append((name, tree.name, os.environ.get(MAMBA_RECOMPUTE[0])))
        tokens = "20000" if name == "base" else "25000"
        code = FULL if name == "router" else WRITES
        command = [sys.executable, "-c", code, str(bench.metrics(name)), tokens]
        with (bench.out / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def header(bench: Any) -> dict[str, Any]:
        facts = {"recipe": bench.recipe.name, "date": "2026-01-01", "gpus": 2}
        return {**facts, "changes": list(bench.changes), "stack": {"gpu": "NVIDIA H200"}}

    monkeypatch.setattr(rows.Bench, "start", start)
    monkeypatch.setattr(rows.Bench, "tree", lambda bench, name: tmp_path / name)
    monkeypatch.setattr(rows.slice_training, "header", header)
    monkeypatch.setenv(*MAMBA_RECOMPUTE)  # as the call of another run may have left it
    places = ("--site", "s", "--work", str(tmp_path / "w"), "--data", "d")
    arguments = [*places, "--out", str(tmp_path), "--only", "base,kept,router"]
    for _ in range(2):  # the second call finds everything done
        done = CliRunner().invoke(rows.main, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert began == [
        ("base", "recomputed", "1"),
        ("kept", "kept", None),
        ("router", "kept", None),
    ]
    found = json.loads((tmp_path / "nam56r_h200_2gpu_ep2_rows.json").read_text())
    assert found["changes"] == [] and found["rows"]["kept"]["changes"] == list(rows._KEPT)
    assert "| kept | recompute_modules=(), gates=() | 12500 | 1.250 | 250 | 110.0 | " in done.output
    assert "moe_router_fusion=True | out of memory |" in done.output


@pytest.mark.parametrize("name", rows.ROWS)
def test_every_row_is_a_recipe(name: str) -> None:
    recipe = recipes_index.load("nam56r_h200_2gpu_ep2")
    changed = recipes_index.with_text(recipe, rows.ROWS[name].changes)
    assert bool(changed.gates) is rows.ROWS[name].mamba_recompute
