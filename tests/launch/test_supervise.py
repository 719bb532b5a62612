"""The process in charge of a run, with a real torchrun, real tmux sessions and real kills."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.host import process
from cppmega.launch import start
from cppmega.launch.supervise import Supervisor
from cppmega.runs import control as run_control
from cppmega.runs import failures, listing, logs, tmux
from cppmega.runs.folder import Node, Run
from tests.launch.bench import (
    Bench,
    gone,
    needs_tmux,
    ranks_recorded,
    ready,
    torchrun_recorded,
    until,
)
from tests.support import PATIENCE

pytestmark = pytest.mark.slow


def test_the_first_rank_that_failed_is_shown_first(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 fails too, in the same second, because rank 1 did."""
    run, other = bench.run("crash", "fails"), bench.run("ended", "exits")
    started = [*bench.start(run), *bench.start(other)]
    assert [one.wait(PATIENCE) for one in started] == [1, 1]
    assert (run.state(), run.exit()) == ("crashed", 1)
    assert failures.in_one_line(run) == "rank 1: ValueError: the data ended"
    logs.show(run, None, follow=True)
    out = capfd.readouterr().out
    # On a busy machine torchrun sees the end of rank 0 first, and ends rank 1 while it exits.
    how = r"exit 1|killed by signal 15 \(SIGTERM\) after its error"
    assert re.match(rf"rank 1 on \S+ failed first \(({how})\):\n", out)
    assert out.index("ValueError: the data ended") < out.index("rank 0 of 2")
    assert "(after it failed: rank 0)" in out
    logs.show(run, 1, follow=False)  # its own output, which the terminal did not show
    assert "rank 1 of 2, mark given" in capfd.readouterr().out
    with pytest.raises(CppmegaError, match="no-such-rank"):
        logs.show(run, 2, follow=False)
    # A rank that leaves no error: the last lines of its stderr stand for one.
    said = failures.first_failure(other)
    assert "rank 0 on " in said and "(exit 3)" in said and "the last words" in said
    line = next(line for line in listing.table([listing.row_of(run)]) if "crash" in line)
    assert line.split()[:3] == ["crashed", "crash", "1"]


@needs_tmux
def test_a_session_is_looked_at_left_and_stopped(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    # A server that was started long ago, from another environment.
    old = {**bench.environment, "MARK": "stale", "TMUX_TMPDIR": str(bench.folder)}
    subprocess.run(["tmux", "new-session", "-d", "-s", "old", "sleep 1000"], env=old, check=True)
    run = bench.run("seen", "long", session="here")
    tmux.refuse_existing("here")
    bench.start_in_tmux(run)
    until(lambda: ready(run), run)
    assert (run.state(), run.exit()) == ("running", None)
    with pytest.raises(CppmegaError, match="session-exists"):
        tmux.refuse_existing("here")
    with pytest.raises(CppmegaError, match="no-terminal"):
        run_control.attach(run)
    shown = attach_and_leave(bench, run)
    assert "rank 0 of 2, mark given" in shown and "stale" not in shown
    assert run.state() == "running" and tmux.exists("here")

    in_charge = run.nodes()[0].status().pid
    os.kill(in_charge, signal.SIGSTOP)  # it hears all of them when `stop` wakes it
    for _ in range(3):  # said again, it must not cost the checkpoint
        os.kill(in_charge, signal.SIGHUP)
        os.kill(in_charge, signal.SIGTERM)
    run_control.stop(run, now=False, wait=PATIENCE)
    out = capfd.readouterr().out
    assert out.startswith("stopped seen, checkpoint of step ")
    assert (run.state(), run.exit()) == ("stopped", 0) and gone(run)
    until(lambda: not tmux.exists("here"), run)
    assert run.checkpoint() == run.steps()[-1].step
    with pytest.raises(CppmegaError, match="run-ended"):
        run_control.stop(run, now=False, wait=1)
    with pytest.raises(CppmegaError, match="run-ended"):
        run_control.attach(run)


def attach_and_leave(bench: Bench, run: Run) -> str:
    """`cppmega attach` on a terminal, then Ctrl-B D; what the terminal showed."""
    command = [sys.executable, "-m", "cppmega", "attach", run.name, "--runs", str(bench.runs)]
    outer, inner = pty.openpty()
    environment = {**bench.environment, "TMUX_TMPDIR": str(bench.folder), "TERM": "xterm"}
    client = subprocess.Popen(command, env=environment, stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    seen, pressed, deadline = b"", 0.0, time.monotonic() + PATIENCE
    while client.poll() is None:
        assert time.monotonic() < deadline, seen
        if select.select([outer], [], [], 0.1)[0]:  # a full terminal would hold the client back
            try:
                seen += os.read(outer, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
        # As a person does: again, where a busy machine has not taken it.
        if b"mark given" in seen and time.monotonic() > pressed + 2:
            os.write(outer, b"\x02d")
            pressed = time.monotonic()
    assert client.wait(PATIENCE) == 0
    os.close(outer)
    return seen.decode(errors="replace")


@needs_tmux
def test_tmux_runs_nothing_that_a_folder_or_an_argument_is_called(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It expands #(...) in names and folders; and what it gives to a shell is expanded there."""
    mark = bench.folder / "hacked"
    monkeypatch.setenv("MARKED", str(mark))  # for the server, and for what it would run
    words = "#(touch $MARKED) $(touch $MARKED) `touch $MARKED`; touch $MARKED;"
    folder = bench.folder / words
    folder.mkdir()
    script = (
        "import json, os, sys, time; from pathlib import Path;"
        "found = [sys.argv[1], os.getcwd(), os.environ['MARK'], sorted(os.environ)];"
        "Path(sys.argv[2]).write_text(json.dumps(found)); time.sleep(2)"
    )
    seen = bench.folder / "seen"
    command = [sys.executable, "-c", script, words, str(seen)]
    tmux.start("here", command, folder, {**bench.environment, "MARK": words})
    deadline = time.monotonic() + PATIENCE
    while not (seen.exists() and seen.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    word, place, variable, names = json.loads(seen.read_text())
    assert (word, place, variable) == (words, str(folder), words)
    assert {"TMUX", "TMUX_PANE"} <= set(names) and "TMUX_TMPDIR" not in names
    assert not [*bench.folder.glob("cppmega-*")], "no environment is left"
    subprocess.run(["tmux", "display-message", "-p", "-t", "here", "#{pane_current_path}"])
    time.sleep(0.5)  # tmux runs such commands in its own time
    assert not mark.exists()


@needs_tmux
def test_a_launch_without_its_session_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launches may ask for one name at the same time: tmux decides who has it."""
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    tmux.start("mine", sleeping, bench.folder, bench.environment)
    run = bench.run("second", "long", session="mine")
    monkeypatch.setattr(start.launch_folder, "create", lambda validated: run.nodes()[0])
    request = SimpleNamespace(nodes=1, runs=bench.runs)
    validated: Any = SimpleNamespace(torchrun=(), environment={}, request=request)
    with pytest.raises(CppmegaError, match="session-exists"):
        start._start_in_session(validated, "mine")
    assert tmux.exists("mine") and not run.path.exists()
    assert len([*bench.folder.glob("cppmega-*")]) <= 1, "that of the first, if it is not read yet"


@needs_tmux
def test_a_killed_session_saves_a_checkpoint(bench: Bench) -> None:
    run = bench.run("hung-up", "long", session="gone")
    bench.start_in_tmux(run)
    until(lambda: ready(run) and len(run.steps()) > 1, run)
    subprocess.run(["tmux", "kill-session", "-t", "gone"], check=True)
    until(lambda: run.state() == "stopped", run)
    assert run.exit() == 0 and run.checkpoint() == run.steps()[-1].step and gone(run)


def test_kill_9_leaves_no_rank_behind(bench: Bench) -> None:
    """Of the process in charge, of torchrun; and a stop that must not wait for a checkpoint."""
    first, third = (bench.run(name, "long") for name in ("one", "three"))
    second = bench.run("two", "helped")
    in_charge = bench.start(first)[0]
    bench.start(second)
    (without_terminal,) = bench.start(third, "env", "--ignore-signal=QUIT", "nohup")
    for run in (first, second, third):
        until(lambda run=run: ready(run) and ranks_recorded(run), run)
    without_terminal.send_signal(signal.SIGHUP)
    in_charge.kill()
    in_charge.wait()
    os.kill(second.nodes()[0].status().agent, signal.SIGKILL)
    assert third.state() == "running"
    run_control.stop(third, now=True, wait=PATIENCE)
    assert (third.state(), third.exit(), third.checkpoint()) == ("stopped", 1, None)
    assert failures.first_failure(third) == ""  # it did as it was told
    until(lambda: gone(first) and gone(second) and gone(third), first)
    assert (first.state(), first.exit()) == ("killed", None)
    assert first.checkpoint() is not None  # SIGTERM reached the ranks through torchrun
    until(lambda: second.state() == "crashed", second)
    until(lambda: not process.started(int((second.path / "helper").read_text())), second)
    assert "torchrun itself ended with signal SIGKILL" in failures.in_one_line(second)
    assert second.checkpoint() is not None
    rows = [listing.row_of(run) for run in (first, second)]
    text = "\n".join(listing.table(rows))
    assert "the launcher was killed; its ranks" in text and "SIGKILL" in text
    assert first.nodes()[0].status().ended  # torchrun's process has written it down
    with pytest.raises(CppmegaError, match="run-ended"):
        run_control.stop(first, now=False, wait=1)


def test_helpers_of_ranks_that_nobody_had_seen_end_too(bench: Bench) -> None:
    """The process in charge may wait for a slow disk while torchrun starts, and is killed."""
    begin = bench.hold_torchrun()
    run = bench.run("unseen", "helped")
    (in_charge,) = bench.start(run)
    until(lambda: torchrun_recorded(run), run)
    in_charge.send_signal(signal.SIGSTOP)
    begin.touch()
    until(lambda: ready(run) and (run.path / "helper").exists(), run)
    status = run.nodes()[0].status()
    assert not status.workers
    os.kill(status.agent, signal.SIGKILL)
    until(lambda: gone(run), run)  # they end with torchrun
    in_charge.send_signal(signal.SIGCONT)
    until(lambda: run.state() == "crashed", run)
    until(lambda: not process.started(int((run.path / "helper").read_text())), run)
    assert run.checkpoint() is not None  # there was time to save


def test_only_a_second_ctrl_c_means_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100, 200, 5))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    for signals, now in (
        ("TERM TERM HUP", False),
        ("INT TERM", False),
        ("INT INT", True),
        ("TERM INT", True),
        ("QUIT", True),
    ):
        asked = Supervisor(Node(bench.folder))
        for name in signals.split():
            asked._on_signal(signal.Signals["SIG" + name], None)
        assert asked.asked and asked.now is now, signals
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    bounced = Supervisor(Node(bench.folder))
    for _ in range(2):  # a terminal that sends it twice
        bounced._on_signal(signal.SIGINT, None)
    assert bounced.asked and not bounced.now


def test_a_stop_before_there_are_ranks(bench: Bench) -> None:
    run = bench.run("early", "long")
    with pytest.raises(CppmegaError, match="run-still-running"):
        run_control.stop(run, now=False, wait=1)
    bench.hold_torchrun()
    bench.start(run)
    until(lambda: torchrun_recorded(run), run)
    os.kill(run.nodes()[0].status().pid, signal.SIGSTOP)  # Ctrl-Z in its terminal
    with pytest.raises(CppmegaError, match="not-saved"):
        run_control.stop(run, now=False, wait=PATIENCE)
    assert run.state() == "stopped" and failures.first_failure(run) == ""


def test_two_hosts_share_a_run_that_ends_by_itself(bench: Bench) -> None:
    run = bench.run("pair", "short", nodes=2)
    started = bench.start(run)
    assert [one.wait(PATIENCE) for one in started] == [0, 0]
    assert (run.state(), run.exit(), run.checkpoint()) == ("finished", 0, 50)
    assert sorted(node.status().first_rank for node in run.nodes()) == [0, 1]
    for rank in (0, 1):
        (log,) = [f for f in logs._files(run, rank) if f.name == "stdout.log"]
        assert log.read_text().startswith(f"rank {rank} of 2")


def test_a_folder_that_nobody_took_charge_of(bench: Bench) -> None:
    node = Node(bench.folder / "nowhere" / "nodes" / "0")
    node.path.mkdir(parents=True)
    assert node.state() == "starting"  # a launch in the making
    os.utime(node.path, (0, 0))
    assert node.state() == "killed"
