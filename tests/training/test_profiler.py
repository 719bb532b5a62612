"""The profiled steps of a run: which they are, what is written of them, and what can go wrong."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.recipe import index as recipes_index
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import json_file
from cppmega.runs.profile import SUMMARY, TRACE, Profile
from cppmega.training import profiler as profiling
from cppmega.training.profiler import StepProfiler, write
from cppmega.training.requirements import Start
from tests.support.traces import MadeTrace

SMOKE = recipes_index.load("smoke_cpu")


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"profile": 2, "profile_after": 199}, "profile-beyond-run"),
        ({"profile": 200}, "profile-beyond-run"),
        ({"profile": 2, "profile_after": 4, "exit_interval": 5}, "profile-beyond-run"),
    ],
)
def test_the_profiled_steps_must_be_in_the_run(how: dict[str, Any], error: str) -> None:
    with pytest.raises(CppmegaError, match=error):
        Start(SMOKE, RunOptions(**how)).check("the profiler")


def test_a_resumed_run_has_only_the_steps_that_are_left(tmp_path: Path) -> None:
    (tmp_path / "iter_0000190").mkdir()
    (tmp_path / "iter_0000190" / "common.pt").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("190")
    fits = RunOptions(profile=2, profile_after=8, load=tmp_path)
    Start(SMOKE, fits).check("the profiler")
    with pytest.raises(CppmegaError, match="has 10, from 191 to 200"):
        Start(SMOKE, RunOptions(profile=2, profile_after=9, load=tmp_path)).check("the profiler")
    Start(SMOKE, RunOptions(profile_after=10_000)).check("the profiler")


def test_megatrons_own_profiler_is_not_started_too() -> None:
    with pytest.raises(CppmegaError, match="profiled-twice"):
        Start(SMOKE.plus("--profile"), RunOptions(profile=1)).check("the profiler")


def exporting(data: bytes) -> Any:
    return lambda path: Path(path).write_bytes(data)


def test_trace_and_summary_are_written_and_nothing_else(tmp_path: Path) -> None:
    made = MadeTrace()
    made.steps(0, 100)
    made.kernel("nvjet_x", 10, 60)
    found = write(exporting(made.data()), tmp_path, 7, recipe="r")
    assert {path.name for path in tmp_path.iterdir()} == {TRACE, SUMMARY}
    assert json_file.read(tmp_path / SUMMARY, Profile) == found
    assert (found.device, found.steps[0].step) == ("NVIDIA H200", 7)


def without_kernels() -> MadeTrace:
    made = MadeTrace()
    made.steps(0, 100)
    made.operator("aten::mm", 10, 20)
    return made


def full(path: str) -> None:
    Path(path).write_bytes(b"{")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("export", "error", "says"),
    [
        (full, "write-failed", "No space left"),
        (exporting(b'{"traceEvents": ['), "write-failed", "incomplete"),
        (lambda path: None, "write-failed", "No such file"),
        (exporting(MadeTrace().data()), "write-failed", "no step"),
        (exporting(without_kernels().data()), "profile-without-kernels", "Another profiler"),
    ],
)
def test_a_profile_that_cannot_be_written_is_named(
    export: Any, error: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(CppmegaError, match=error) as raised:
        write(export, tmp_path, 1, recipe="r")
    assert says in raised.value.render()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_created_is_named_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cppmega.training.profiler.check_profiler", lambda: None)
    (tmp_path / "file").touch()
    options = RunOptions(profile=1, profile_folder=tmp_path / "file" / "profile")
    with pytest.raises(CppmegaError, match="write-failed"):
        StepProfiler(options, 1, rank=0)
    StepProfiler(options, 1, rank=1)  # other ranks write nothing


def test_a_torch_that_cannot_profile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.profiler, "supported_activities", set)
    with pytest.raises(CppmegaError, match="package-missing"):
        profiling.check_profiler()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_torch_records_the_profiled_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(profiling, "check_profiler", lambda: None)
    monkeypatch.setattr(profiling, "_check", lambda trace: None)  # it has no kernels
    options = RunOptions(profile=2, profile_after=3, profile_folder=tmp_path)
    profiler = StepProfiler(options, 1, rank=0, recipe="small")
    step = profiler.around(lambda: torch.ones(8, 8) @ torch.ones(8, 8))
    for _ in range(6):
        step()
    found = json_file.read(tmp_path / SUMMARY, Profile)
    assert found is not None and found.recipe == "small" and found.versions["torch"]
    assert [one.step for one in found.steps] == [4, 5] and found.waiting_share == 1
    assert found.gaps[0].host.keys() >= {"aten::matmul"}


def test_every_rank_knows_which_steps_were_slower() -> None:
    options = RunOptions(profile=2, profile_after=3)
    other = StepProfiler(options, 1, rank=5)
    slower = []
    for _ in range(7):
        with other.step():
            pass
        slower.append(other.took_disturbed())
    # The step before the profiled ones, too: the profiler starts in it.
    assert slower == [False, False, True, True, True, False, False]
    step = StepProfiler(RunOptions(), 1, rank=0).around(len)
    assert step is len, "nothing is wrapped without a profile"
