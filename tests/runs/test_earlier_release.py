"""Run folders written by commit 430962d, whose records had no types: read as they always were.

`finished` trained eight steps and saved; `crashed` resumed from it, and one of its two ranks was
killed. Only paths, host and boot were replaced.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from cppmega.launch import prepare as launch
from cppmega.launch.request import LaunchRequest
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import compare, failures, json_file, listing
from cppmega.runs import folder as run_folder
from cppmega.runs.folder import RunDamagedError
from tests.support import pristine

MADE = Path(__file__).parent / "made_at_430962d"


@pytest.fixture(name="runs")
def runs_folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MADE, tmp_path / "runs"))


def test_they_are_listed(runs: Path) -> None:
    rows = [listing.row_of(run) for run in run_folder.everyone(runs)]
    assert json.loads(json.dumps(json_file.plain(rows))) == [
        {
            "name": "crashed",
            "state": "crashed",
            "exit": 1,
            "recipe": "smoke_cpu",
            "overlay": "eb6fad411b922ce7",
            "created": 1795334774.08466,
            "seconds": 60.41562080383301,
            "step": 15,
            "loss": 3.5933624505996704,
            "checkpoint": 12,
            "tmux": None,
            "hosts": ["trainer-1"],
            "error": "rank 1: killed by signal 9 (SIGKILL)",
            "folder": str(runs / "crashed"),
        },
        {
            "name": "finished",
            "state": "finished",
            "exit": 0,
            "recipe": "smoke_cpu",
            "overlay": "eb6fad411b922ce7",
            "created": 1795334674.6696415,
            "seconds": 39.7692654132843,
            "step": 8,
            "loss": 4.744717359542847,
            "checkpoint": 8,
            "tmux": None,
            "hosts": ["trainer-1"],
            "error": "",
            "folder": str(runs / "finished"),
        },
    ]


def test_its_first_failure_is_shown(runs: Path) -> None:
    shown = failures.first_failure(run_folder.find(runs, "crashed"))
    assert shown.startswith("rank 1 on trainer-1 failed first (killed by signal 9 (SIGKILL))")


def test_they_are_compared(runs: Path) -> None:
    found = compare.compare(run_folder.find(runs, "finished"), run_folder.find(runs, "crashed"))
    assert found.arguments == ["--exit-interval: 8 | None"]
    for part in (found.overlay, found.recipe, found.environment, found.stack, found.data):
        assert part == []
    assert [row.step for row in found.steps] == list(range(1, 16))
    assert found.tokens_per_second == (11609.210396705594, 7389.983212660387)
    text = list(compare.lines(found))
    assert text[0] == (
        "A  finished (finished): recipe smoke_cpu, overlay eb6fad411b922ce7, megatron-core 0.19.2"
    )
    assert text[-1].startswith("no step is in both runs; throughput 11609 and 7390 tokens/s")


def test_a_launch_resumes_from_one(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the data that the earlier run names, and the checkpoint in its folder."""
    monkeypatch.setattr(launch, "_examined", lambda *_: {})
    data = runs / "data"
    data.mkdir()
    manifest = runs / "crashed" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("/home/user/runs/finished/data", str(data)))
    changes = ("num_layers=1", "mtp_num_layers=1", "train_iters=40")
    options = RunOptions(changes=changes, root=pristine("0.19.2"))
    request = LaunchRequest(recipe="smoke_cpu", options=options, runs=runs, resume="crashed")
    validated = launch.prepare(request)
    assert validated.options.load == runs / "crashed" / "checkpoints"
    assert validated.options.data == (str(data),)
    assert validated.request.resume == "crashed"


@pytest.mark.parametrize("removed", ["arguments", "options", "created", "nproc"])
def test_one_without_a_part_is_listed_and_not_compared(runs: Path, removed: str) -> None:
    file = runs / "crashed" / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest[removed]
    file.write_text(json.dumps(manifest))
    run = run_folder.find(runs, "crashed")
    assert listing.row_of(run).recipe == "smoke_cpu" and not run.problem
    with pytest.raises(RunDamagedError, match=f"its manifest lacks {removed}"):
        compare.compare(run, run_folder.find(runs, "finished"))


@pytest.mark.parametrize(
    ("part", "value", "problem"),
    [
        ("nodes", 0, "nodes"),
        ("nproc", "two", "nproc"),
        ("stack", {"torch": 2}, "stack"),
        ("options", {"save_interval": "often"}, "options.save_interval"),
        ("recipe", [], "recipe"),
    ],
)
def test_one_with_an_impossible_value_is_named(
    runs: Path, part: str, value: object, problem: str
) -> None:
    file = runs / "crashed" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), part: value}))
    run = run_folder.find(runs, "crashed")
    assert listing.row_of(run).error.startswith("manifest.json is damaged")
    with pytest.raises(CppmegaError, match="run-damaged") as caught:
        compare.compare(run, run_folder.find(runs, "finished"))
    assert problem in caught.value.what


def test_one_of_a_later_release_with_more_in_it_is_read(runs: Path) -> None:
    """The schema is what tells another form; a field more does not."""
    file = runs / "crashed" / "manifest.json"
    before = run_folder.find(runs, "crashed").manifest
    manifest = json.loads(file.read_text())
    manifest |= {"weather": {"rain": True}, "options": {**manifest["options"], "speed": 3}}
    manifest["overlay"]["colour"] = "blue"
    file.write_text(json.dumps(manifest))
    assert run_folder.find(runs, "crashed").manifest == before
    status = runs / "crashed" / "nodes" / "0" / "status.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "mood": "good"}))
    assert run_folder.find(runs, "crashed").state() == "crashed"
