"""Training runs that a benchmark starts."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
index = importlib.import_module("cppmega.recipe.index")
runs = importlib.import_module("benchmarks.harness.runs")


def test_a_run_ends_with_an_ended_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: Any) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(runs.Bench, "rows", ended)
    places = [tmp_path] * 4
    bench = runs.Bench(index.load("smoke_cpu"), (), *places, 60.0)
    run = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(SystemExit):
        bench.wait("run", run)
    assert run.returncode
