"""A run whose disk, terminal, folder or process in charge is taken away: it ends, and says how."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from cppmega.host import durable, process
from cppmega.launch.supervise import Supervisor
from cppmega.runs import control as run_control
from cppmega.runs import failures, json_file, listing, liveness, logs
from cppmega.runs.folder import Run
from cppmega.runs.json_file import read_object
from cppmega.runs.status import Failure, Status
from tests.launch.bench import Bench, gone, ranks, ranks_recorded, ready, until
from tests.support import PATIENCE, REPOSITORY

pytestmark = pytest.mark.slow


def test_a_status_is_written_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second file fits, and the file's own blocks are all there is."""
    file = tmp_path / "status.json"
    durable.reserve(file)
    assert read_object(file) == {}
    room = file.stat().st_size

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "replace", full)
    durable.write(file, {"failure": {"message": "a" * 2 * room}, "exit": 1})
    found = read_object(file)
    assert found["exit"] == 1 and found["failure"]["message"].startswith("aaa")
    durable.write(file, {"exit": 0})
    assert read_object(file) == {"exit": 0} and file.stat().st_size == room
    with pytest.raises(OSError, match="No space left"):
        durable.write(tmp_path / "new.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


_ON_A_FULL_DISK = """
mount -t tmpfs -o size=300k none "$1" || exit 77
cp -a "$2"/. "$1" && cd "$1" || exit 78
{python} -m cppmega.launch.supervise "$1/runs/full/nodes/0" < /dev/null &
while ! ls runs/full/ready-0 runs/full/ready-1 > /dev/null 2>&1; do sleep 0.1; done
cat /dev/zero > filler 2> /dev/null
kill -TERM $!
wait $!
echo "exit $?"
{python} -m cppmega runs
"""


def test_a_full_disk_in_the_run_folder(bench: Bench) -> None:
    """A tmpfs in a mount namespace of its own, filled while the ranks step."""
    run = bench.run("full", "long")
    small, text = bench.folder / "small", bench.folder / "runs" / "full" / "manifest.json"
    small.mkdir()
    text.write_text(text.read_text().replace(str(bench.folder), str(small)))
    kept = bench.folder / "kept"
    kept.mkdir()
    shutil.move(run.path.parent, kept / "runs")
    shutil.copy(bench.script, kept)
    script = _ON_A_FULL_DISK.format(python=sys.executable)
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script, "-", str(small), str(kept)],
        env={**bench.environment, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if "exit " not in done.stdout:
        pytest.skip(f"this machine does not allow a tmpfs to be mounted: {done.stderr.strip()}")
    assert "\nexit 1\n" in done.stdout
    assert "full crashed, exit status 1" in done.stdout
    table = done.stdout.partition("\nSTATE")[2].splitlines()
    assert table[1].split()[:3] == ["crashed", "full", "1"]
    assert "the disk of the run folder is full" in table[2]


def test_the_folder_deleted_and_the_terminal_closed_or_stuck(bench: Bench) -> None:
    """Each of them ends as it was told to; the exit status is the run's."""
    deleted, closed, stuck = (
        bench.run(name, mode)
        for name, mode in (("deleted", "long"), ("closed", "short"), ("stuck", "short"))
    )
    command = [sys.executable, "-m", "cppmega.launch.supervise"]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, b"x" * 65536)
        except BlockingIOError:
            break
    os.set_blocking(writer, True)
    first = subprocess.Popen(
        [*command, str(deleted.nodes()[0].path)],
        env=bench.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    second = subprocess.Popen(
        ["bash", "-c", 'exec "$@" >&- 2>&- <&-', "-", *command, str(closed.nodes()[0].path)],
        env=bench.environment,
    )
    third = subprocess.Popen(
        [*command, str(stuck.nodes()[0].path)], env=bench.environment, stdout=writer
    )
    bench.started += [first, second, third]
    until(lambda: ready(deleted), deleted)
    of_deleted = ranks(deleted)
    while deleted.path.exists():
        shutil.rmtree(deleted.path, ignore_errors=True)
    said, _ = first.communicate(timeout=PATIENCE)
    assert first.returncode == 1 and "exit status 1" in said, said
    assert "it was removed, or another is in its place" in said
    assert not any(process.started(pid) for pid in of_deleted) and not deleted.path.exists()
    assert [second.wait(PATIENCE), third.wait(PATIENCE)] == [0, 0]
    for run in (closed, stuck):
        assert (run.state(), run.exit(), run.checkpoint()) == ("finished", 0, 50)
    # What was printed did not land in a file that took the number of the closed stream.
    status = closed.nodes()[0].status_file.read_text()
    assert "cppmega:" not in status and "finished" in closed.nodes()[0].console.read_text()
    os.close(reader)
    os.close(writer)


def test_ranks_that_do_not_listen_after_their_launcher_is_killed(bench: Bench) -> None:
    """Neither `running` nor over: nothing may go on from its checkpoint, and it can be ended."""
    run, other = bench.run("stubborn", "stubborn"), bench.run("both", "stubborn")
    in_charge = bench.start(run)[0], bench.start(other)[0]
    until(lambda: ready(run) and ready(other), run)
    # Who is killed before it has written down its ranks leaves them to their parent-death signal.
    for each in (run, other):
        until(partial(ranks_recorded, each), each)
    for one in in_charge:
        one.kill()
        one.wait()
    os.kill(other.nodes()[0].status().agent, signal.SIGKILL)
    time.sleep(1)
    for each in (run, other):
        assert each.state() == "stopping" and not gone(each)
        run_control.stop(each, now=True, wait=PATIENCE)
        until(partial(gone, each), each)  # a killed process is in the table until it is reaped
        assert (each.state(), each.exit()) == ("killed", None)
    assert failures.in_one_line(run).startswith("the launcher was killed; its ranks were asked")
    assert "ended without an end record" in failures.in_one_line(other)


_ORPHAN = """
import os, subprocess, sys, time
from cppmega.host import process
from cppmega.launch.agent_watch import Watch
watch = Watch(os.getppid(), float(sys.argv[1]), lambda: os._exit(0))
process.end_with_parent()
watch.start()
sleeper = '''
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getppid(), os.getpid(), flush=True)
time.sleep(1000)
'''
rank = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
rank.wait()
time.sleep(1000)
"""


def test_a_killed_launchers_ranks_are_ended_after_a_while(tmp_path: Path) -> None:
    """They ignore SIGTERM; what starts them waits for something else afterwards."""
    command = f'"{sys.executable}" -c "$0" 1 & wait'
    launcher = subprocess.Popen(
        ["bash", "-c", command, _ORPHAN],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    with launcher.stdout:
        pids = [int(word) for word in launcher.stdout.readline().split()]
    began = time.monotonic()
    launcher.kill()
    launcher.wait()
    while any(process.started(pid) for pid in pids):
        assert time.monotonic() < began + PATIENCE
        time.sleep(0.02)
    assert time.monotonic() > began + 1, "they get time"


def test_a_stop_while_torchrun_waits_for_other_hosts(bench: Bench) -> None:
    """It waits in C++, where no signal handler of Python's runs."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        run = bench.run("waits", "long")
        words = list(run.outline.torchrun)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        where = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", address]
        manifest = read_object(run.manifest_file)
        json_file.write(run.manifest_file, {**manifest, "torchrun": where + words[1:]})
        bench.start(Run(run.path))
        silent.settimeout(PATIENCE)
        connection, _ = silent.accept()
        with connection, pytest.raises(CppmegaError, match="not-saved"):
            run_control.stop(Run(run.path), now=False, wait=PATIENCE)
    assert run.state() == "stopped"


def test_a_status_that_is_torn_empty_or_foreign(bench: Bench) -> None:
    run = bench.run("odd", "long")
    (node,) = run.nodes()
    for text in ("", "{", '{"pid": 1}', "[" * 100_000, "\x00" * 50, '{"host": 3}', '{"a": {}}'):
        node.status_file.write_text(text)
        assert (node.status(), run.state()) == (None, "starting"), text[:20]
    with node.console.open("ab") as console:
        liveness.hold(console)
        assert run.state() == "running", "it lives, whatever became of its status"
    os.utime(node.path, (0, 0))
    assert run.state() == "killed" and "cannot be read" in failures.in_one_line(run)
    host = socket.gethostname()
    node.status_file.write_text(f'{{"host": "{host}", "workers": {{"x": 3, "-1": null}}}}')
    assert run.state() == "killed"
    node.status_file.unlink()
    os.utime(node.path, (time.time() + 9e6,) * 2)  # the clock was set back
    assert run.state() == "killed"
    assert failures.in_one_line(run) == "the launch ended before its run began"


def test_a_run_that_ended_with_its_machine(bench: Bench) -> None:
    run = bench.run("old", "long")
    (node,) = run.nodes()
    me = {"pid": os.getpid(), "since": process.started(os.getpid()), "host": socket.gethostname()}
    node.write(Status(**me, boot="another", workers={str(os.getpid()): me["since"]}))
    assert run.state() == "killed"
    row = listing.row_of(run)
    assert row.error == "the machine was restarted while it ran" and row.exit is None


def test_a_run_in_another_container(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same machine and host name, and other numbers of processes: a lock tells."""
    run = bench.run("contained", "long")
    (node,) = run.nodes()
    me = os.getpid()
    node.write(
        Status(
            host=socket.gethostname(),
            boot=process.boot(),
            pid=me,
            since=process.started(me),
            namespace="pid:[1]",
            agent=me,
        )
    )
    with node.console.open("ab") as console:
        liveness.hold(console)
        assert run.state() == "running"
        with pytest.raises(CppmegaError, match=r"run-elsewhere: .*in another container"):
            run_control.stop(run, now=True, wait=1)
        os.utime(node.status_file, (0, 0))
        assert listing.row_of(run).error.startswith("no sign of life from ")
    assert run.state() == "killed"
    assert failures.in_one_line(run) == "its container ended while it ran"


def test_signs_of_life_for_other_machines(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench.run("remote", "long")
    (node,) = run.nodes()
    node.write(Status(host="another", boot="b", pid=1, since="1"))
    assert (run.state(), listing.row_of(run).error) == ("running", "")
    os.utime(node.status_file, (0, time.time() - 4000))
    assert run.state() == "running", "whoever resumes it must know that it is over"
    assert listing.row_of(run).error == "no sign of life from another for 1:06:40"
    in_charge = Supervisor(node)
    in_charge._heartbeat()
    assert listing.row_of(run).error == ""
    os.utime(node.status_file, (0, 0))
    in_charge._heartbeat()  # not at every check
    assert node.status_file.stat().st_mtime == 0


def test_a_node_has_one_process_in_charge_ever(bench: Bench) -> None:
    run = bench.run("once", "long")
    (node,) = run.nodes()
    node.write(Status(host="h", ended=1.0, exit=0))
    with pytest.raises(CppmegaError, match="run-began-already"):
        Supervisor(node).run()
    assert run.state() == "finished"


def test_a_folder_that_is_deleted_is_not_followed_for_ever(bench: Bench) -> None:
    run = bench.run("gone", "long")
    assert run.state() == "starting"
    shutil.rmtree(run.path)
    assert run.state() == "killed"


def test_what_a_rank_printed_does_not_steer_the_terminal(bench: Bench) -> None:
    run = bench.run("odd", "long")
    (node,) = run.nodes()
    failure = Failure(rank=0, local_rank=0, exit=1, message="x\x1b]0;title\x07\x1b[2Jy")
    node.write(Status(host="h", ended=1.0, exit=1, failure=failure, note="disk\x1bfull"))
    (line,) = [x for x in listing.table([listing.row_of(run)]) if "rank 0" in x]
    assert line.strip() == "rank 0: x ]0;title  [2Jy (disk full)"


@pytest.mark.parametrize(
    "failure", [{}, {"rank": 0}, {"rank": "x", "message": 1}, {"exit": None, "message": "m"}]
)
def test_a_foreign_failure_does_not_take_down_the_table(
    bench: Bench, failure: dict[str, object]
) -> None:
    run = bench.run("odd", "long")
    (node,) = run.nodes()
    durable.write(node.status_file, {"host": "h", "ended": 1.0, "exit": 1, "failure": failure})
    assert (run.state(), run.exit()) == ("crashed", 1)
    assert next(iter(listing.table([listing.row_of(run)]))).startswith("STATE")
    assert failures.first_failure(run) in ("", "m. Its last lines:")


def test_a_log_of_one_endless_line_is_not_held_in_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = bench.run("endless", "long")
    (node,) = run.nodes()
    node.console.write_bytes(b"x" * 100_000)
    monkeypatch.setattr(logs, "_CHUNK", 1000)
    logs.show(run, None, follow=False)
    assert capfd.readouterr().out == "x" * 100_000
    (line,) = failures.tail(node.console)
    assert len(line) == 2**16
