"""The benchmark of a whole recipe: killed, resumed, and what it says of both."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tests.support import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
whole = importlib.import_module("whole_training")
report = importlib.import_module("whole_report")

TRAINS = """
import json, sys, time
from pathlib import Path
folder, metrics, stalled = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "stalled"
saved = folder / "latest_checkpointed_iteration.txt"
done = int(saved.read_text()) if folder.exists() else 0
last = int(sys.argv[4])
print("cppmega: recipe", flush=True)
with metrics.open("a") as file:
    def say(row):
        file.write(json.dumps(row) + "\\n")
        file.flush()
    say({"start": "nam56r_h200_2gpu_ep2", "overlay": "abc", "mock_data": False})
    for step in range(done + 1, last + 1):
        loss = 11.1 - step / 100 + (0.001 if done else 0)
        losses = {"lm loss": loss, "mtp_1 loss": loss, "mtp_2 loss": loss, "indexer loss": 0.1}
        say({"step": step, "seconds": 0.5, "tokens_per_second": 20000.0, "tflops_per_gpu": 250.0,
             "tflops_per_gpu_by_megatron": 200.0, "peak_gib": 110.0, "loss": loss,
             "grad_norm": 1.0, "losses": losses, "mock_data": False,
             "expert_load": [[0.5, 1.5], [0.25, 2.0]]})
        if step == 20 and not done:
            folder.mkdir()
            print("cppmega: checkpoint of step 20: 76.0 GiB in 60.0 s", flush=True)
        if step % 10 == 0:
            say({"evaluated": step, "losses": {k: v + 0.1 for k, v in losses.items()},
                 "tokens": 1000, "seconds": 1.0})
        if step > 24 and not done:
            time.sleep(0.5)  # an asynchronous save ends later
            saved.write_text("20")
        if step > 24 and (not done or stalled):
            time.sleep(100)
"""


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of a run that a script makes up, killed and resumed by the benchmark."""
    return ran(tmp_path, monkeypatch)


def ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str, resumed: str = "well"
) -> dict[str, Any]:
    """The result of such a run."""

    def start(bench: Any, name: str, tree: Path, *given: str) -> subprocess.Popen[bytes]:
        place = "--save" if "--save" in given else "--load"
        folder = given[given.index(place) + 1]
        last = str(bench.recipe.train_iters)
        command = [sys.executable, "-c", TRAINS, folder, str(bench.metrics(name)), resumed, last]
        with (bench.out / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    facts = {
        "recipe": "nam56r_h200_2gpu_ep2",
        "changes": ["train_iters=30"],
        "date": "2026-01-01",
        "gpus": 2,
        "stack": {"gpu": "NVIDIA H200", "torch": "2.11"},
        "data": {"fingerprint": "f00", "documents": 3, "tokens": 4000},
    }
    held = {"fingerprint": "f01", "documents": 2, "tokens": 1000}
    monkeypatch.setattr(whole.Bench, "start", start)
    monkeypatch.setattr(whole.Bench, "tree", lambda bench, name: tmp_path)
    monkeypatch.setattr(whole.slice_training, "header", lambda bench: facts)
    monkeypatch.setattr(whole, "held_out_facts", lambda prefix: held)
    out = tmp_path / "out"
    places = ("--site", "site", "--work", "work", "--data", "train", "--held-out", "held")
    steps = ("--set", "train_iters=30", "--save-after", "20", "--kill-after", "25")
    monkeypatch.chdir(tmp_path)
    arguments = ["run", *places, "--out", str(out), *steps, *options]
    done = CliRunner().invoke(whole.main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads((out / "nam56r_h200_2gpu_ep2.json").read_text())
    return {**found, "file": out / "nam56r_h200_2gpu_ep2.json"}


def test_lost_steps_are_compared_with_their_repetition_and_counted_once(
    result: dict[str, Any],
) -> None:
    run, resume = result["runs"]["overlay"], result["resume"]
    assert run["steps"] == 30 and [row[0] for row in run["curve"]] == list(range(1, 31))
    assert resume["killed_after_step"] == 25 and resume["repeated_steps"] == [21, 25]
    assert resume["largest_difference"] == pytest.approx(0.001)
    assert run["losses"]["lm loss"][20] == pytest.approx(11.1 - 0.21 + 0.001)
    assert [row[0] for row in result["held_out_losses"]] == [10, 20, 30]
    assert result["saves"] == ["checkpoint of step 20: 76.0 GiB in 60.0 s"]
    assert len(result["seconds_to_first_step"]) == 2


def test_the_page_has_speed_losses_balance_and_kill(result: dict[str, Any]) -> None:
    page = report.page(result)
    assert "| tokens/s per GPU | 10000 |" in page
    assert "lm loss 11.090, mtp_1 loss 11.090, mtp_2 loss 11.090; random weights" in page
    assert "expected to have 11.910 (ln V = 11.090), from which the farthest is 6.9%" in page
    assert "0.25 to 2.00, the most of the median layer 2.00" in page
    assert "after step 25" in page and "checkpoint of step 20" in page
    assert "| 20 | 11.0000 | 11.0000 | 11.0000 | 1,000 | 1.0 |" in page


def test_another_recipe_trains_the_steps_after_the_checkpoint_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ran(tmp_path, monkeypatch, "--reload", "nam56r_h200_1gpu", "--reload-steps", "4")
    again = found["reload"]
    assert (again["recipe"], again["gpus"], again["from_step"]) == ("nam56r_h200_1gpu", 1, 20)
    assert [step for step, _, _ in again["losses"]] == [21, 22, 23, 24]
    assert again["largest_difference"] == pytest.approx(0.0)
    page = report.page(found)
    assert "`nam56r_h200_1gpu`, on 1 GPU, loaded the checkpoint of step 20 and trained" in page
    with pytest.raises(click.ClickException, match="began at 3, not after step 20"):
        report.repeated([{"step": 3, "loss": 1.0}], [], 20)


@pytest.mark.slow
def test_what_a_time_limit_leaves_is_a_result_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "room_for_another", lambda folder: False)
    found = ran(tmp_path, monkeypatch, "--timeout", "10", resumed="stalled")
    assert found["runs"]["overlay"]["steps"] == 25
    page = report.page(found)
    assert "stopped at its time limit, before step 30" in page
    assert "The resumed part saved nothing" in page


@pytest.mark.slow
def test_the_curves_are_drawn(result: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    assert report.draw(result["file"]).stat().st_size > 10_000


def test_a_run_that_began_anew_is_no_result() -> None:
    row = {"loss": 1.0, "grad_norm": 1.0}
    killed = [{"step": step, **row} for step in range(1, 26)]
    with pytest.raises(click.ClickException, match="resumed at 1"):
        report.measured(killed, killed, 20)
    with pytest.raises(click.ClickException, match="a step is missing"):
        report.measured(killed[3:], [{"step": 21, **row}], 20)
