"""The profiled steps of a run: which they are, what is written of them, and what can go wrong."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.recipe import index as recipes_index
from cppmega.recipe.run_options import RunOptions
from cppmega.rules import starts
from cppmega.runs import json_file
from cppmega.runs.profile import SUMMARY, TRACE, Profile
from cppmega.training import profiler as profiling
from cppmega.training.profiler import StepProfiler, write
from cppmega.training.requirements import Start
from tests.support import patched, python
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
        Start(SMOKE, RunOptions(**how)).check(*starts.PROFILE)


def test_a_resumed_run_has_only_the_steps_that_are_left(tmp_path: Path) -> None:
    (tmp_path / "iter_0000190").mkdir()
    (tmp_path / "iter_0000190" / "common.pt").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("190")
    fits = RunOptions(profile=2, profile_after=8, load=tmp_path)
    Start(SMOKE, fits).check(*starts.PROFILE)
    with pytest.raises(CppmegaError, match="has 10, from 191 to 200"):
        Start(SMOKE, RunOptions(profile=2, profile_after=9, load=tmp_path)).check(*starts.PROFILE)
    Start(SMOKE, RunOptions(profile_after=10_000)).check(*starts.PROFILE)


def test_megatrons_own_profiler_is_not_started_too() -> None:
    with pytest.raises(CppmegaError, match="profiled-twice"):
        Start(SMOKE.plus("--profile"), RunOptions(profile=1)).check(*starts.PROFILE)


def exporting(data: bytes) -> Any:
    return lambda path: Path(path).write_bytes(data)


def test_trace_and_summary_are_written_and_nothing_else(tmp_path: Path) -> None:
    made = MadeTrace()
    made.steps(0, 100)
    made.kernel("nvjet_x", 10, 60)
    found = write(exporting(made.data()), tmp_path, 7, on_gpu=True, recipe="r")
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
        write(export, tmp_path, 1, on_gpu=True, recipe="r")
    assert says in raised.value.render()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_created_is_named_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = RunOptions(profile=1, profile_folder=tmp_path / "file" / "profile")
    with pytest.raises(CppmegaError, match="write-failed"):
        StepProfiler(options, 1, rank=0, on_gpu=False)
    StepProfiler(options, 1, rank=1, on_gpu=False)  # other ranks write nothing


def test_a_torch_that_cannot_profile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.profiler, "supported_activities", set)
    profiling.check_profiler(on_gpu=False)
    with pytest.raises(CppmegaError, match="package-missing"):
        profiling.check_profiler(on_gpu=True)
    monkeypatch.setattr(torch.profiler, "kineto_available", lambda: False)
    with pytest.raises(CppmegaError, match="package-missing"):
        profiling.check_profiler(on_gpu=False)


def test_every_rank_knows_which_steps_were_slower() -> None:
    options = RunOptions(profile=2, profile_after=3)
    other = StepProfiler(options, 1, rank=5, on_gpu=True)
    slower = []
    for _ in range(7):
        with other.step():
            pass
        slower.append(other.took_disturbed())
    # The step before the profiled ones, too: the profiler starts in it.
    assert slower == [False, False, True, True, True, False, False]
    step = StepProfiler(RunOptions(), 1, rank=0, on_gpu=True).around(len)
    assert step is len, "nothing is wrapped without a profile"


LOOP = """
import sys
from pathlib import Path
from cppmega.recipe import index
from cppmega.recipe.run_options import RunOptions
from cppmega.smoke import loop

sys.argv.append("--unguarded")
folder = Path(FOLDER)
recipe = index.load("smoke_cpu").with_(
    train_iters=6, num_layers=1, mtp_num_layers=1, micro_batch_size=2, global_batch_size=2)
loop.train(recipe, RunOptions(
    profile=2, profile_after=3, profile_folder=folder / "profile", data=(str(folder / "data"),),
    metrics=folder / "metrics.jsonl"))
"""


@pytest.mark.slow
@pytest.mark.megatron
def test_a_loop_on_cpu_is_profiled(tmp_path: Path) -> None:
    root = patched("0.19.2", "mtp_roll_packed_sequences", "dataset_helpers_prebuilt")
    done = python(root, f"FOLDER = {str(tmp_path)!r}\n{LOOP}")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json_file.read(tmp_path / "profile" / SUMMARY, Profile)
    assert found is not None and found.device == "CPU" and found.recipe == "smoke_cpu"
    assert [step.step for step in found.steps] == [4, 5]
    assert found.versions["torch"] and found.rank == 0
    kinds = {kind.kind: kind for kind in found.kinds}
    assert kinds["products"].kernels[0].name == "aten::mm" and kinds["optimizer"].ms > 0
    assert abs(found.busy_ms + found.waiting_ms - found.step_ms) < 1e-6
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["profiled"] for row in rows[1:]] == [False, False, True, True, True, False]
    # A step under the profiler takes as long as its window does, up to what is around it. Each of
    # them has lines that the other has not, where the machine may stop for seconds in one step.
    pairs = [(step.ms, 1000 * rows[step.step]["seconds"]) for step in found.steps]
    assert any(0.5 * window <= taken <= 3 * window + 100 for window, taken in pairs), pairs
    assert "profile of smoke_cpu, steps 4 to 5" in done.stdout
