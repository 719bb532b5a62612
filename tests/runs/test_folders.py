"""Run folders: how they are found, and which state and which end they tell."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from cppmega.catalogue import gates
from cppmega.checkpoints.tracker import TRACKER
from cppmega.errors import CppmegaError
from cppmega.host import process
from cppmega.launch import agent
from cppmega.launch import prepare as launch
from cppmega.runs import compare, listing, liveness, logs
from cppmega.runs import control as run_control
from cppmega.runs import folder as run_folder
from cppmega.runs.folder import Run
from cppmega.runs.metrics import LoggedStep
from cppmega.runs.status import Failure, Status
from tests.runs.made import asked, ended, make


def test_runs_are_found_by_name_session_beginning_and_folder(tmp_path: Path) -> None:
    with pytest.raises(CppmegaError, match="no-runs"):
        run_folder.find(tmp_path, None)
    old = make(tmp_path, "big-1", 1, tmux="demo")
    new = make(tmp_path, "big-2", 2, tmux="demo")
    (tmp_path / "data").mkdir()  # no run
    assert run_folder.everyone(tmp_path) == [new, old]
    found = {name: run_folder.find(tmp_path, name) for name in (None, "big-1", "demo")}
    assert found == {None: new, "big-1": old, "demo": new}
    assert run_folder.find(Path("elsewhere"), str(old.path)) == old
    for name, error in (("big", "run-ambiguous"), ("small", "run-unknown")):
        with pytest.raises(CppmegaError, match=error):
            run_folder.find(tmp_path, name)
    with pytest.raises(CppmegaError, match="run-exists"):
        run_folder.create(tmp_path, "big-1")
    for name in ("", "a b", "-x", ".x", "a/b", "../x"):
        with pytest.raises(CppmegaError, match="bad-name"):
            run_folder.create(tmp_path, name)
    assert run_folder.fresh_name(tmp_path, "r") != "r"


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"created": 1, "na',
        "[1]",
        '{"schema": 9}',
        '{"created": "yesterday"}',
        '{"created": 1, "recipe": "x"}',
        "\x00\x80",
    ],
)
def test_one_damaged_folder_does_not_take_down_the_others(tmp_path: Path, text: str) -> None:
    whole, damaged = make(tmp_path, "whole", 2), make(tmp_path, "damaged", 3)
    for run in (whole, damaged):
        ended(run, 0)
    damaged.manifest_file.write_text(text, encoding="latin-1")
    runs = run_folder.everyone(tmp_path)
    lines = list(listing.table([listing.row_of(run) for run in runs]))
    assert sum("manifest.json" in line for line in lines) == 1
    found = run_folder.find(tmp_path, "damaged")
    assert listing.row_of(found).seconds is None
    for wants_it in (
        lambda: compare.compare(whole, found),
        lambda: logs.show(found, rank=0, follow=False),
        lambda: launch.prepare(asked(tmp_path, resume="damaged")),
    ):
        with pytest.raises(CppmegaError, match="run-damaged") as damage:
            wants_it()
        assert ("upgrade cppmega" in str(damage.value)) == ("schema" in text)


def test_a_status_and_metrics_that_are_damaged(tmp_path: Path) -> None:
    run = make(tmp_path, "run", 1)
    ended(run, 0)
    row = {"step": 1, "loss": 1.0, "seconds": 1.0, "tokens_per_second": 1.0}
    run.metrics.write_bytes(json.dumps(row).encode() + b'\n\xff\xfe\n{"step": \n3\n')
    step = LoggedStep(**row)
    assert run.steps() == [step] and run.last_step() == step
    (node,) = run.nodes()
    node.status_file.write_text('{"pid": "x", "ended": "yesterday"}')
    assert node.status() is None and listing.row_of(run).state == "starting"


def test_a_run_that_was_moved_has_its_curves_and_checkpoints(tmp_path: Path) -> None:
    places = {"save": str(tmp_path / "old" / "checkpoints"), "metrics": str(tmp_path / "old" / "m")}
    run = make(tmp_path, "old", 1, **places)
    run.metrics.write_text('{"step": 3}\n')
    (run.path / "checkpoints").mkdir()
    (run.path / "checkpoints" / TRACKER).write_text("3")
    run.path.rename(tmp_path / "new")
    moved = run_folder.find(tmp_path, "new")
    assert (moved.last_step(), moved.checkpoint()) == (LoggedStep(step=3), 3)


def test_no_name_is_no_beginning_of_one(tmp_path: Path) -> None:
    """`cppmega stop "$UNSET"` must not stop the only run."""
    make(tmp_path, "only", 1)
    with pytest.raises(CppmegaError, match="run-unknown") as caught:
        run_folder.find(tmp_path, "")
    assert caught.value.next == f"cppmega runs --runs {tmp_path}"
    (run,) = run_folder.everyone(tmp_path)
    assert run_folder.find(Path("elsewhere"), run.word) == run


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CppmegaError, match="folder-not-writable"):
        run_folder.create(tmp_path / "file", "run")


def test_the_variable_names_the_folder_and_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPPMEGA_RUNS", raising=False)
    assert run_folder.root() == Path("runs")
    monkeypatch.setenv("CPPMEGA_RUNS", "/elsewhere")
    assert run_folder.root() == Path("/elsewhere")
    assert run_folder.root(Path("given")) == Path("given")
    gates.check([], {"CPPMEGA_RUNS": "/elsewhere", "CPPMEGA_RUN": "/elsewhere/one"})


def test_one_word_for_every_end(tmp_path: Path) -> None:
    term = Failure(rank=0, local_rank=0, signal="SIGTERM", exit=-15, message="")
    broken = Failure(rank=1, local_rank=1, exit=1, message="x")
    for name, code, more, state in (
        ("a", 0, {}, "finished"),
        ("b", 0, {"stop": "checkpoint"}, "stopped"),
        ("c", 1, {"stop": "checkpoint", "failure": term}, "stopped"),  # before its first step
        ("d", 1, {"stop": "checkpoint", "failure": broken}, "crashed"),  # while it was saving
        ("e", 1, {"stop": "now"}, "stopped"),
        ("f", 1, {"failure": broken}, "crashed"),
    ):
        run = make(tmp_path, name, 1)
        ended(run, code, **more)
        assert (run.state(), run.exit()) == (state, code), name
    pair = make(tmp_path, "pair", 1, nodes=2)
    ended(pair, 0)
    ended(pair, 1, failure=broken)
    assert (pair.state(), pair.exit()) == ("crashed", 1)


def test_a_run_that_ends_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is gone when it is looked for, and the status that was read is out of date."""
    me = {"pid": os.getpid(), "since": process.started(os.getpid()), "boot": process.boot()}
    live = Status(**me, host=socket.gethostname(), stop="checkpoint")

    def ending_at(look: int, name: str) -> Run:
        """A run that is alive when it is looked at before."""
        run = make(tmp_path, name, 1)
        node = run_folder.claim_node(run, 1)
        assert node is not None
        node.write(live)
        looks = itertools.count(1)

        def in_charge(status: Status) -> bool:
            alive = next(looks) < look
            if not alive:
                node.write(structs.replace(live, ended=time.time(), exit=0))
            return alive

        monkeypatch.setattr(liveness, "in_charge", in_charge)
        return run

    assert ending_at(1, "one").state() == "stopped"
    with pytest.raises(CppmegaError, match="run-ended: two is stopped"):
        run_control.stop(ending_at(2, "two"), now=False, wait=1)


def test_a_reader_that_stops_in_the_middle_does_not_keep_the_lock_of_a_run(tmp_path: Path) -> None:
    """It is stopped while it asks whether the lock is held; the run is not without one for that."""
    file = tmp_path / "console.log"
    file.touch()
    ask = (
        "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH);"
        "print(1, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", ask, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        reader.stdout.readline()
        leave = threading.Timer(0.5, reader.stdin.close)
        leave.start()
        with FileIO(file, "a") as console:
            liveness.hold(console)
            assert liveness.held(file)
        leave.join()


def test_a_process_of_before_the_reboot_or_of_the_same_number(tmp_path: Path) -> None:
    run = make(tmp_path, "run", 1)
    node = run_folder.claim_node(run, 1)
    assert node is not None
    me = {"pid": os.getpid(), "since": process.started(os.getpid()), "boot": process.boot()}
    mine = Status(**me, host=socket.gethostname())
    node.write(mine)
    assert run.state() == "running"
    node.write(structs.replace(mine, stop="checkpoint"))
    assert run.state() == "stopping"
    for wrong in ({"since": "1"}, {"boot": "another"}, {"pid": 2**22 + 1}):
        node.write(structs.replace(mine, **wrong))
        assert run.state() == "killed", wrong
    node.write(structs.replace(mine, host="another", since="1"))
    assert run.state() == "running"  # nothing can be said from here
    with pytest.raises(CppmegaError, match="run-elsewhere"):
        run_control.stop(run, now=False, wait=1)
    with pytest.raises(CppmegaError, match="run-elsewhere"):
        run_control.attach(run)


def test_a_second_stop_finds_what_the_first_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path, "run", 1)
    node = run_folder.claim_node(run, 1)
    assert node is not None
    me = {"pid": os.getpid(), "since": process.started(os.getpid()), "boot": process.boot()}
    status = Status(**me, host=socket.gethostname(), stop="checkpoint")
    node.write(status)
    run.checkpoints.mkdir()
    (run.checkpoints / TRACKER).write_text("5")
    run.metrics.write_text('{"step": 5}\n')
    over = structs.replace(status, ended=time.time(), exit=0)
    monkeypatch.setattr(process, "send", lambda *_: node.write(over))
    run_control.stop(run, now=False, wait=9)
    assert capsys.readouterr().out == "stopped run, checkpoint of step 5\n"
    node.write(status)
    run.metrics.write_text('{"step": 6}\n')
    with pytest.raises(CppmegaError, match="not-saved"):
        run_control.stop(run, now=False, wait=9)


def test_the_first_failure_is_told_by_the_exact_time(tmp_path: Path) -> None:
    failures = {}
    for rank, at in ((0, 100.9), (1, 100.2)):
        file = tmp_path / f"{rank}.json"
        said = {"message": f"m{rank}", "extraInfo": {"py_callstack": f"trace {rank}", "time": at}}
        file.write_text(json.dumps({"message": said}))
        failures[rank] = SimpleNamespace(
            error_file=str(file), timestamp=100, local_rank=rank, exitcode=1
        )
    first = agent.first(failures)
    assert (first.rank, first.message, first.others) == (1, "trace 1", (0,))


@pytest.mark.parametrize(("seen", "first"), [(101, 1), (131, 0)])
def test_a_killed_rank_fails_before_the_error_that_it_causes(
    tmp_path: Path, seen: int, first: int
) -> None:
    """Torchrun sees the end of a killed rank late, and kills a rank itself after thirty seconds."""
    file = tmp_path / "0.json"
    details = {"py_callstack": "connection reset by peer", "time": 100.9}
    file.write_text(json.dumps({"message": {"message": "", "extraInfo": details}}))
    failures = {
        0: SimpleNamespace(error_file=str(file), timestamp=100, local_rank=0, exitcode=1),
        1: SimpleNamespace(
            error_file=str(tmp_path / "none.json"),
            timestamp=seen,
            local_rank=1,
            exitcode=-signal.SIGKILL,
            signal_name=lambda: "SIGKILL",
        ),
    }
    assert agent.first(failures).rank == first


def test_a_pipe_in_a_run_folder_is_not_waited_for(tmp_path: Path) -> None:
    run = make(tmp_path, "odd", 1)
    ended(run, 0)
    run.checkpoints.mkdir()
    (node,) = run.nodes()
    node.status_file.unlink()
    for file in (node.status_file, run.metrics, run.checkpoints / TRACKER):
        os.mkfifo(file)
    row = listing.row_of(run_folder.find(tmp_path, "odd"))
    assert (row.state, row.step, row.checkpoint) == ("starting", None, None)
