"""The slice benchmark's own logic: what counts as a result, and a kill that leaves nothing."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

from cppmega.recipe import index as recipes_index
from tests.support import PATIENCE

runs = importlib.import_module("benchmarks.harness.runs")
report = importlib.import_module("benchmarks.slices.training")


def rows(steps: int = 20, **changes: Any) -> list[dict[str, Any]]:
    """A run's metrics: slow while warming up, then steady."""
    start = {"start": "nam56r_h200_slice", "overlay": "abc", "mock_data": False}
    found = [
        {
            "step": step,
            "seconds": 5.0 if step <= report.WARM else 0.5,
            "tokens_per_second": 4096 / 0.5,
            "tflops_per_gpu": 60.0,
            "tflops_per_gpu_by_megatron": 50.0,
            "peak_gib": 60.0 + step / 100,
            "loss": 11.0 - step / 100,
            "grad_norm": 1.0,
            "losses": {"lm loss": 11.0, "mtp_2 loss": 12.0, "mtp_1 loss": 11.5},
            "mock_data": False,
        }
        for step in range(1, steps + 1)
    ]
    found[-1] |= changes
    return [start, *found]


def test_warm_up_is_left_out_of_the_medians() -> None:
    row = report.measured(rows())
    assert row["milliseconds"] == 500.0
    assert (row["tokens_per_second"], row["peak_gib"]) == (8192.0, 60.2)
    assert row["mtp"][0] == [1, 11.5, 12.0]
    assert len(row["curve"]) == 20


def test_profiled_steps_are_left_out_of_the_medians() -> None:
    made = rows()
    for row in made[-6:]:
        row |= {"seconds": 9.0, "tokens_per_second": 1.0, "profiled": True}
    row = report.measured(made)
    assert (row["milliseconds"], row["tokens_per_second"]) == (500.0, 8192.0)


@pytest.mark.parametrize(
    "changes",
    [{"loss": float("nan")}, {"grad_norm": float("inf")}, {"grad_norm": None}, {"mock_data": True}],
)
def test_what_is_no_result(changes: dict[str, Any]) -> None:
    with pytest.raises(click.ClickException):
        report.measured(rows(**changes))


def test_too_short_a_run_is_no_result() -> None:
    with pytest.raises(click.ClickException, match="warm up"):
        report.measured(rows(report.WARM))


def result() -> dict[str, Any]:
    """A whole result."""
    return {
        "recipe": "nam56r_h200_slice",
        "changes": [],
        "date": "2026-01-01",
        "gpus": 1,
        "stack": {"gpu": "H200", "torch": "2.11"},
        "data": {"fingerprint": "f00", "documents": 3, "tokens": 4000},
        "runs": {"stock": report.measured(rows()), "overlay": report.measured(rows())},
        "resume": {
            "killed_after_step": 25,
            "resumed_from_step": 20,
            "compared_steps": [21, 40],
            "largest_difference": 1e-4,
            "unkilled_difference": 2e-4,
            "loss_span": 3.0,
        },
    }


def test_the_table_and_the_headline_name_both_runs() -> None:
    text = report.table(result())
    assert "| tokens/s | 8192.0 | 8192.0 |" in text
    assert "\n1 GPU; gpu H200, torch 2.11.\n" in text
    assert "stock, made to start" in text and "resumed from step 20" in text
    line = report.headline(result())
    assert "stock 8192 tokens/s, 60.2 GiB; overlay 8192" in line
    alone = {**result(), "runs": {"overlay": report.measured(rows())}}
    del alone["resume"]
    assert "| tokens/s | 8192.0 |\n" in report.table(alone)


def test_the_pools_of_cuda_graphs_are_a_row_only_where_a_run_has_them() -> None:
    made = rows()
    for row in made[1:]:
        row["graph_pool_gib"] = 3.2109375 if row["step"] > 3 else None  # captured in step 4
    graphs = report.measured(made)
    assert graphs["graph_pool_gib"] == 3.21
    plain = result()
    assert "graph_pool_gib" not in plain["runs"]["stock"]
    assert "CUDA graphs" not in report.table(plain)
    runs = {"stock": report.measured(rows()), "overlay": graphs, "linear": {"out_of_memory": True}}
    text = report.table({**plain, "runs": runs})
    assert "| reserved for CUDA graphs, GiB |  | 3.21 | out of memory |" in text


def a_bench(tmp_path: Path) -> Any:
    """A bench in a temporary folder."""
    recipe = recipes_index.load("nam56r_h200_slice")
    return runs.Bench(recipe, (), tmp_path, tmp_path, tmp_path, tmp_path / "data", 20.0)


def test_a_run_is_killed_at_its_step_with_all_its_children(tmp_path: Path) -> None:
    metrics = tmp_path / "resume.jsonl"
    code = (
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'],\n"
        "                         start_new_session=True)\n"  # as torchrun starts its ranks
        "for step in range(1, 10_000):\n"
        "    with open(sys.argv[1], 'a') as file:\n"
        "        file.write(json.dumps({'step': step, 'child': child.pid}) + '\\n{')\n"
        "        file.seek(0, 2)\n"
        "        file.truncate(file.tell() - 1)\n"
        "    time.sleep(0.05)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(metrics)], start_new_session=True)
    own = a_bench(tmp_path)
    own.wait("resume", process, until=3)
    assert process.poll() is None
    child = own.rows("resume")[0]["child"]
    runs.kill(process)
    deadline = time.monotonic() + PATIENCE
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()
    assert max(row["step"] for row in own.rows("resume")) < 9_999


def test_a_failed_run_shows_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "stock.log").write_text("error: out of memory")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(click.ClickException, match="out of memory"):
        a_bench(tmp_path).wait("stock", process)


def test_a_run_that_does_not_fit_is_a_result(tmp_path: Path) -> None:
    (tmp_path / "stock.log").write_text("torch.OutOfMemoryError: CUDA out of memory.")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(MemoryError):
        a_bench(tmp_path).wait("stock", process)
    full = {
        **result(),
        "runs": {"stock": {"out_of_memory": True}, "linear": report.measured(rows())},
    }
    assert "| tokens/s | out of memory | 8192.0 |" in report.table(full)
    assert "stock out of memory; linear 8192" in report.headline(full)


def test_a_line_being_written_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "stock.jsonl").write_text(json.dumps({"step": 1}) + '\n{"step": 2')
    assert a_bench(tmp_path).rows("stock") == [{"step": 1}]


@pytest.mark.slow
def test_the_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result()))
    assert report.draw(file) == file.with_suffix(".png")
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
