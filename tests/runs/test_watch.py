"""A run that is watched: how far it is, whether it stalls and who is behind, and its spikes."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cppmega.cli.main import main
from cppmega.host import process
from cppmega.runs import folder as run_folder
from cppmega.runs import json_file, metrics, rank_progress, watch
from cppmega.runs.folder import Run
from cppmega.runs.metrics import LoggedStep, Start
from cppmega.runs.rank_progress import RankProgress
from cppmega.runs.spikes import Spikes
from cppmega.runs.status import Status
from tests.support import REPOSITORY

TIMES = 10.0


def make(runs: Path, name: str = "demo", **manifest: Any) -> Run:
    """A run that this process is in charge of."""
    run = run_folder.create(runs, name)
    content = {
        **{"created": 1.0, "nodes": 1, "nproc": 2, "arguments": [], "environment": {}},
        **{"recipe": {"name": "r"}, "overlay": {"digest": "a"}, "megatron": {}, "data": {}},
        **{"options": {}, "stack": {}, "save": str(run.path / "checkpoints")},
        **manifest,
    }
    json_file.write(run.manifest_file, content)
    node = run_folder.claim_node(run, 1)
    assert node is not None
    me = os.getpid()
    node.write(
        Status(
            host=socket.gethostname(),
            boot=process.boot(),
            namespace=process.namespace(),
            pid=me,
            since=process.started(me),
        )
    )
    return run


def train(run: Run, last: int, seconds: float = 2.0, total: int | None = 1000) -> None:
    """Log every step up to the last one, which ended just now."""
    metrics.append(run.metrics, Start(start="r", train_iters=total))
    for step in range(1, last + 1):
        logged = LoggedStep(
            step=step, seconds=seconds, tokens_per_second=100.0, loss=3.0, grad_norm=1.0
        )
        metrics.append(run.metrics, logged)


def after(run: Run, seconds: float) -> float:
    """So long after the last step was logged, however long it took to come here."""
    return run.metrics.stat().st_mtime + seconds


def end(run: Run, code: int) -> None:
    (node,) = run.nodes()
    status = node.status()
    assert status is not None
    node.write(Status(host=status.host, ended=time.time(), exit=code))


# -- how far it is ------------------------------------------------------------------------------


def test_the_next_checkpoint_and_the_end_are_computed_from_the_last_steps(tmp_path: Path) -> None:
    run = make(tmp_path, options={"save_interval": 30})
    train(run, last=100)
    sight = watch.look(run, TIMES)
    assert (sight.step, sight.end, sight.saves_at) == (100, 1000, 120)
    assert sight.until(sight.saves_at) == 40.0 and sight.until(sight.end) == 1800.0
    assert watch.line(sight) == (
        "running demo: step 100/1000, loss 3.0000, grad norm 1, 100 tokens/s, "
        "checkpoint in 0:00:40, end in 0:30:00"
    )


@pytest.mark.parametrize(
    ("options", "total", "end_at", "saves_at"),
    [
        ({"exit_interval": 80, "save_interval": 500}, 1000, 160, 160),
        ({"save_interval": 0}, 110, 110, 110),
        ({"save_interval": 500}, None, None, 500),
    ],
)
def test_a_run_ends_at_what_comes_first(
    tmp_path: Path, options: dict[str, int], total: int | None, end_at: int | None, saves_at: int
) -> None:
    run = make(tmp_path, options=options)
    train(run, last=100, total=total)
    sight = watch.look(run, TIMES)
    assert (sight.end, sight.saves_at) == (end_at, saves_at)


def test_a_run_that_does_not_save_has_no_next_checkpoint(tmp_path: Path) -> None:
    run = make(tmp_path, save=None)
    train(run, last=3)
    assert watch.look(run, TIMES).saves_at is None


def test_a_run_without_a_step_yet(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert watch.line(watch.look(run, TIMES)) == "running demo: no step yet"
    metrics.append(run.metrics, Start(start="r"))
    assert watch.look(run, TIMES, now=after(run, 9999)).stall == ""


# -- stalls -------------------------------------------------------------------------------------


def test_a_stall_is_so_many_times_the_usual_and_ends_with_the_next_step(tmp_path: Path) -> None:
    run = make(tmp_path)
    train(run, last=20)
    assert watch.look(run, TIMES, now=after(run, 18)).stall == ""
    stalled = watch.look(run, TIMES, now=after(run, 50))
    assert "no step after 20 for 0:00:" in stalled.stall and " times the usual" in stalled.stall
    assert "STALLED" in watch.line(stalled)
    end(run, 0)
    assert watch.look(run, TIMES, now=after(run, 50)).stall == ""


def test_steps_that_are_logged_now_and_then_are_no_stall(tmp_path: Path) -> None:
    run = make(tmp_path)
    for step in range(10, 200, 10):
        metrics.append(run.metrics, LoggedStep(step=step, seconds=2.0))
    assert watch.look(run, TIMES, now=after(run, 190)).stall == ""
    assert watch.look(run, TIMES, now=after(run, 220)).stall


def test_a_pause_to_save_is_no_stall_of_a_run_with_short_steps(tmp_path: Path) -> None:
    run = make(tmp_path)
    train(run, last=20, seconds=0.01)
    assert watch.look(run, TIMES, now=after(run, 5)).stall == ""


RANK = """
import sys
from cppmega.runs import rank_progress
marks = rank_progress.of_this_rank()
for batches in map(int, sys.argv[1].split(",")):
    marks.begin_step()
    for _ in range(batches):
        marks.read_batch()
print("ready", flush=True)
sys.stdin.read()
"""


class Ranks:
    """Processes that count as ranks do, and wait."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, batches: str, **environ: str) -> int:
        rank = {"RANK": str(len(self.processes)), "CPPMEGA_RUN": str(self.run.path), **environ}
        one = subprocess.Popen(
            [sys.executable, "-c", RANK, batches],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), **rank},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
        self.processes.append(one)
        (node,) = self.run.nodes()
        raw = json_file.read_object(node.status_file)
        workers = {str(p.pid): process.started(p.pid) for p in self.processes}
        json_file.write(node.status_file, {**raw, "workers": workers})
        return one.pid

    def close(self) -> None:
        for one in self.processes:
            one.kill()
            one.communicate()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(make(tmp_path / "runs"))
    yield made
    made.close()


def test_the_rank_that_is_behind_is_named(ranks: Ranks) -> None:
    first = ranks.start("2,2,1")
    ranks.start("2,2")
    assert rank_progress.read(first) == RankProgress(3, 1)
    assert rank_progress.behind(ranks.run) == (
        "rank 1 is behind (in its step 2, micro-batch 2); the first is in its step 3, micro-batch 1"
    )
    train(ranks.run, last=5)
    assert "rank 1 is behind" in watch.look(ranks.run, TIMES, now=after(ranks.run, 60)).stall


def test_a_rank_that_is_stopped_is_named_before_one_that_is_behind(ranks: Ranks) -> None:
    pid = ranks.start("2")
    ranks.start("1")
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    assert rank_progress.behind(ranks.run) == f"rank 0 (process {pid}) is stopped"


def test_equal_ranks_and_ranks_that_keep_no_counts_are_not_accused(ranks: Ranks) -> None:
    ranks.start("2,1")
    ranks.start("2,1")
    assert rank_progress.behind(ranks.run) == ""
    unknown = ranks.start("2", CPPMEGA_RUN="")
    assert rank_progress.read(unknown) is None and rank_progress.behind(ranks.run) == ""
    train(ranks.run, last=5)
    assert "is not known here" in watch.look(ranks.run, TIMES, now=after(ranks.run, 60)).stall


def test_a_pipeline_holds_micro_batches_back() -> None:
    counts = {0: RankProgress(4, 8), 1: RankProgress(4, 5)}
    assert rank_progress.slowest(counts, slack=3) == ""
    assert "rank 1 is behind" in rank_progress.slowest(counts, slack=2)
    assert "rank 1 is behind" in rank_progress.slowest({**counts, 1: RankProgress(3, 8)}, slack=3)
    assert rank_progress.slowest({}, slack=0) == ""


def test_the_stages_of_a_pipeline_are_those_of_the_launch(tmp_path: Path, ranks: Ranks) -> None:
    run = make(tmp_path, "wide", arguments=["--pipeline-model-parallel-size", "4"])
    ranks.run = run
    ranks.start("4")
    ranks.start("1")
    train(run, last=5)
    assert "is not known here" in watch.look(run, TIMES, now=after(run, 60)).stall


# -- spikes -------------------------------------------------------------------------------------


def test_a_loss_or_norm_far_above_the_last_ones_is_a_spike() -> None:
    spikes, noise = Spikes(), random.Random(1)
    for _ in range(60):
        assert spikes.remark(3 + noise.gauss(0, 0.05), 1 + noise.gauss(0, 0.1)) == ""
    assert spikes.remark(4.0, 1.0).startswith("loss 4 (median of the last 50: ")
    assert spikes.remark(3.0, 5.0).startswith("grad norm 5 (median of the last 50: ")
    assert spikes.remark(2.0, 0.1) == ""


def test_the_descent_of_a_young_run_is_no_spike() -> None:
    spikes = Spikes()
    losses = [11.0 * 0.97**step + 2 for step in range(200)]
    assert not any(spikes.remark(loss, loss) for loss in losses)
    assert Spikes().remark(99.0, 99.0) == ""


def test_a_new_level_is_usual_after_a_while() -> None:
    spikes = Spikes()
    for _ in range(50):
        spikes.remark(3.0, None)
    found = [bool(spikes.remark(4.0, None)) for _ in range(50)]
    assert found[0] and not found[-1]


def test_a_recent_spike_is_shown_with_its_step(tmp_path: Path) -> None:
    run = make(tmp_path)
    train(run, last=40)
    metrics.append(run.metrics, LoggedStep(step=41, seconds=2.0, loss=9.0, grad_norm=1.0))
    metrics.append(run.metrics, LoggedStep(step=42, seconds=2.0, loss=3.0, grad_norm=1.0))
    assert watch.look(run, TIMES).spike == "step 41: loss 9 (median of the last 40: 3)"


# -- the command --------------------------------------------------------------------------------


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        main(("runs", *words))
    out, err = capsys.readouterr()
    return (done.value.code if isinstance(done.value.code, int) else 0), out, err


@pytest.mark.parametrize(("exit_status", "code", "state"), [(0, 0, "finished"), (1, 1, "crashed")])
def test_a_watch_ends_with_its_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    exit_status: int,
    code: int,
    state: str,
) -> None:
    run = make(tmp_path)
    train(run, last=5)
    looks = iter([lambda: train(run, last=6), lambda: None, lambda: end(run, exit_status)])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(looks)())
    found, out, _ = command(capsys, "--watch", "--every", "0", "--runs", str(tmp_path))
    assert found == code
    assert [line.split(",")[0] for line in out.splitlines()] == [
        *("running demo: step 5/1000", "running demo: step 6/1000", f"{state} demo: step 6/1000")
    ]


def test_a_line_now_and_then_and_at_once_when_there_is_news(tmp_path: Path) -> None:
    run = make(tmp_path)
    train(run, last=30)
    first = watch.look(run, TIMES)
    metrics.append(run.metrics, LoggedStep(step=31, seconds=2.0, loss=3.0))
    quiet = watch.look(run, TIMES)
    metrics.append(run.metrics, LoggedStep(step=32, seconds=2.0, loss=9.0))
    spike = watch.look(run, TIMES)
    stalled, later = (watch.look(run, TIMES, now=after(run, wait)) for wait in (60, 90))
    told = list(watch.lines(iter([[one] for one in (first, quiet, spike, stalled, later)]), 3600))
    assert [line.partition(",")[0][-5:] for line in told] == ["/1000"] * 3
    assert "SPIKE: step 32" in told[1] and "STALLED" in told[2]


def test_no_live_run_is_said_and_a_named_one_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path)
    train(run, last=5)
    end(run, 0)
    code, out, err = command(capsys, "--watch", "--runs", str(tmp_path))
    assert (code, out) == (0, "") and "no run is live" in err
    code, out, _ = command(capsys, "demo", "--watch", "--runs", str(tmp_path))
    assert code == 0 and out.startswith("finished demo: step 5")
    assert command(capsys, "--watch", "--json", "--runs", str(tmp_path))[0] == 2


def test_a_list_can_name_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        end(make(tmp_path, name), 0)
    _, out, _ = command(capsys, "two", "--runs", str(tmp_path))
    assert "two" in out and "one" not in out
