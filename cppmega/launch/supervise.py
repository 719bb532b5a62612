"""The process in charge of one host's part of a run: starts torchrun, passes on a stop.

It lives in the tmux session or in the terminal; torchrun and its ranks have sessions of their own,
so that Ctrl-C or a lost terminal reaches this process alone. SIGINT, SIGTERM and SIGHUP ask the
ranks to save a checkpoint and end (SIGTERM, which Megatron's --exit-signal-handler waits for);
Ctrl-C again, or SIGQUIT, ends them at once. SIGTERM and SIGHUP never do, however often they come:
schedulers and terminals repeat themselves. Whatever happens, the end is kept in the folder: on a
full disk, without a terminal; and where this process is killed, `cppmega.launch.agent` sees to it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from cppmega.ending import record as end_record
from cppmega.errors import CppmegaError
from cppmega.host import durable, env, process
from cppmega.host.console import hold_standard_streams
from cppmega.host.terminal import Terminal
from cppmega.launch.agent import FAILURE, ORPHANS, of_torchrun
from cppmega.runs import liveness
from cppmega.runs.failures import said_of
from cppmega.runs.folder import Node
from cppmega.runs.manifest import read_json

_PERIOD = 0.2
_AGAIN = 1.0
"""Seconds after which a second Ctrl-C is meant as one."""
_KILLED = 10.0
"""Seconds that torchrun gets to see that its ranks were killed."""
_WRITE_AGAIN = 5.0
"""Seconds between two tries to write down what could not be written."""
_ALIVE = 60.0
"""Seconds between two signs of life."""
_KEEP = 10.0
"""Seconds for which it is tried to write down the end."""
_FULL = 2**16
"""Free bytes of a disk on which nothing more can be written."""
_SOFT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """One torchrun.

    Args:
        node: this host's part of the run.
        words: torchrun's; by default those of the manifest, in which no secret is recorded.
    """

    def __init__(self, node: Node, words: Sequence[str] = ()) -> None:
        self.node, self.words = node, words
        self.asked = 0.0
        """When a stop was asked for; 0: it was not."""
        self.by = ""
        """The signal that asked."""
        self.now = False
        self.give_up = 0.0
        """When torchrun is killed too, once its ranks were; 0: they were not."""
        self.written = 0.0
        """When the status was last written, or could not be."""
        self.trouble = ""
        """Why the status in the folder is not the latest one."""
        self.folder = _identity(node.path)
        self.status: dict[str, Any] = {
            "host": socket.gethostname(),
            "boot": process.boot(),
            "namespace": process.namespace(),
            "pid": os.getpid(),
            "since": process.started(os.getpid()),
            "started": time.time(),
            "workers": {},
            "stop": "",
            "ended": None,
            "exit": None,
        }

    def run(self) -> int:
        """Start, wait, write down the end. Answers the exit status.

        Raises:
            CppmegaError: `run-began-already`, `run-folder-not-written`; nothing was started.
        """
        if self.node.status_file.exists():
            raise _began_already(self.node)
        self._listen()
        with self._console() as console:  # and its lock, until the end is written
            self.terminal = Terminal(self.node.console)
            self.terminal.start()
            code = self._torchrun(console)
            self._end_orphans()
            if code:
                process.end_helpers(str(self.node.run.path), map(int, self.status["workers"]))
            return self._finish(code)

    def _listen(self) -> None:
        for number in (*_SOFT, signal.SIGQUIT):
            ignored = signal.getsignal(number) is signal.SIG_IGN
            # nohup and a shell's & mean it, but what `cppmega stop` sends was asked for.
            if not ignored or number in (signal.SIGTERM, signal.SIGQUIT):
                signal.signal(number, self._on_signal)

    def _console(self) -> FileIO:
        """Take charge of the folder; the file that torchrun and its ranks print into."""
        try:
            durable.reserve(self.node.path / FAILURE)
            self.node.write(self.status)
            console = FileIO(self.node.console, "a")
        except OSError as error:
            raise _not_written(self.node, error) from None
        liveness.hold(console)
        return console

    def _torchrun(self, console: FileIO) -> int:
        try:
            agent = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,  # signals of the terminal are ours to pass on
                env={**os.environ, env.RUN.name: str(self.node.run.path)},
            )
        except OSError as error:
            self._say(f"torchrun could not be started: {error}")
            return 1
        self.status |= {"agent": agent.pid, "agent_since": process.started(agent.pid)}
        self._write()
        while agent.poll() is None:
            self._see_workers(agent.pid)
            if self.now or (self.asked and not self.status["stop"]):
                self._pass_on()
            if self.give_up and time.monotonic() > self.give_up:
                agent.kill()
            self._give_sign_of_life()
            time.sleep(_PERIOD)
        return agent.returncode

    def command(self) -> list[str]:
        """torchrun with this host's logs."""
        words = self.words or self.node.run.manifest["torchrun"]
        logs = ["--log-dir", str(self.node.logs)]
        # -u: it repeats the ranks' lines into a file, and somebody follows that file.
        return [
            sys.executable,
            "-u",
            "-m",
            "cppmega.launch.agent",
            str(self.node.path),
            *logs,
            *words,
        ]

    def _on_signal(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        again = bool(self.asked) and now - self.asked > _AGAIN
        if number == signal.SIGQUIT or (number == signal.SIGINT and again):
            self.now = True
        self.by = self.by or signal.Signals(number).name
        self.asked = self.asked or now

    def _pass_on(self) -> None:
        if self.now:
            self.now = False
            self._say("ending at once: the ranks are killed, nothing is saved")
            self._mark("now")
            self._signal_workers(signal.SIGKILL)
            self.give_up = time.monotonic() + (_KILLED if self.status["workers"] else 0)
            return
        self._say(
            f"asked to stop ({self.by}): the ranks save a checkpoint after their step, and end. "
            "Ctrl-C again, or cppmega stop --now, ends them at once"
        )
        self._mark("checkpoint")
        self._signal_workers(signal.SIGTERM)
        if not self.status["workers"]:  # torchrun has not come to start any
            process.send(self.status["agent"], signal.SIGTERM)

    def _mark(self, kind: str) -> None:
        self.status["stop"] = kind
        self._write()

    def _signal_workers(self, number: signal.Signals) -> None:
        for pid in self._living():
            process.send(pid, number)

    def _living(self) -> list[int]:
        known = self.status["workers"].items()
        return [int(pid) for pid, since in known if process.alive(int(pid), since)]

    def _see_workers(self, agent: int) -> None:
        known = {str(pid): process.started(pid) for pid in process.children(agent)}
        if set(known) - set(self.status["workers"]):
            self.status["workers"].update(known)
            self._write()
        if known and "first_rank" not in self.status:
            place = process.environment(int(next(iter(known))))
            if "RANK" in place:  # not before it has become python
                first = int(place["RANK"]) - int(place["LOCAL_RANK"])
                self.status["first_rank"] = first
                self._write()

    def _end_orphans(self) -> None:
        """torchrun ends its ranks, unless it was killed: then they get time to save, and end."""
        deadline = time.monotonic() + ORPHANS
        self._signal_workers(signal.SIGTERM)
        while self._living():
            if self.now or time.monotonic() > deadline:
                self._signal_workers(signal.SIGKILL)
                return
            time.sleep(_PERIOD)

    def _finish(self, code: int) -> int:
        failure = read_json(self.node.path / FAILURE) if code else end_record.missing(self.node)
        if code and not failure:
            failure = of_torchrun(code)
        code = code or int(bool(failure))
        self.status |= {"ended": time.time(), "exit": code, "workers": {}}
        if code:
            self.status["failure"] = failure
        if self._disk_is_full():
            self.status["note"] = "the disk of the run folder is full"
        self._write_the_end()
        self._say_the_end(code)
        return code if code >= 0 else 128 - code

    def _say_the_end(self, code: int) -> None:
        run = self.node.run
        said = said_of(self.node)
        if said:
            self._say(said)
        if self.trouble:
            kept = f"how it ended could not be written into the run folder ({self.trouble})"
            self._say(f"{run.name}: exit status {code}; {kept}")
        else:
            step = run.checkpoint()
            kept = f"; newest checkpoint: step {step}" if step is not None else ""
            self._say(f"{run.name} {self.node.state()}, exit status {code}{kept}")
        self.terminal.finish()

    def _write_the_end(self) -> None:
        deadline = time.monotonic() + _KEEP
        self._write()
        while self.trouble and self.node.path.is_dir() and time.monotonic() < deadline:
            time.sleep(_PERIOD)
            self._write()

    def _write(self) -> None:
        """Write the status; where that cannot be done, the run goes on, and it is tried again."""
        self.written = time.monotonic()
        before = self.trouble
        try:
            if _identity(self.node.path) != self.folder:
                raise FileNotFoundError(0, "it was removed, or another is in its place")
            self.node.write(self.status)
            self.trouble = ""
        except OSError as error:
            self.trouble = str(error.strerror)
        if self.trouble and self.trouble != before:
            self._say(f"the run folder cannot be written: {self.trouble}")

    def _give_sign_of_life(self) -> None:
        """For those who look from another machine; or write what could not be written before."""
        silent = time.monotonic() - self.written
        if self.trouble and silent > _WRITE_AGAIN:
            self._write()
        elif silent > _ALIVE:
            self.written = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self.node.status_file)

    def _disk_is_full(self) -> bool:
        try:
            return shutil.disk_usage(self.node.path).free < _FULL
        except OSError:
            return False

    def _say(self, text: str) -> None:
        line = f"cppmega: {text}\n".encode(errors="replace")
        try:
            with self.node.console.open("ab", buffering=0) as console:
                console.write(line)
        except OSError:
            self.terminal.put(line)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Which folder that is, whatever has its name later."""
    with contextlib.suppress(OSError):
        found = folder.stat()
        return found.st_dev, found.st_ino
    return None


def _began_already(node: Node) -> CppmegaError:
    return CppmegaError(
        "run-began-already",
        f"{node.run.name} has a process in charge, or had one: it is {node.state()}.",
        "A second one would overwrite how it ended.",
        f"cppmega logs {node.run.word}; to train on: cppmega launch RECIPE --resume "
        f"{node.run.word}",
    )


def _not_written(node: Node, error: OSError) -> CppmegaError:
    return CppmegaError(
        "run-folder-not-written",
        f"{node.path} cannot be written: {error.strerror}.",
        "How the run ended could not be kept. Nothing was started.",
        f"df -h {node.path}; then launch again with --runs FOLDER on a disk with room",
    )


def main() -> NoReturn:
    """`python -m cppmega.launch.supervise NODE TORCHRUN-WORDS`, as the tmux session runs it."""
    hold_standard_streams()
    try:
        sys.exit(Supervisor(Node(Path(sys.argv[1])), sys.argv[2:]).run())
    except CppmegaError as error:
        sys.exit(error.render())


if __name__ == "__main__":
    main()
