"""The process in charge of one host's part of a run: starts torchrun, passes on a stop.

It runs in the tmux session or in the terminal; torchrun and its ranks have sessions of their own,
so that Ctrl-C or a lost terminal reaches this process alone. SIGINT, SIGTERM and SIGHUP ask the
ranks to save a checkpoint and end (SIGTERM, which Megatron's --exit-signal-handler waits for);
Ctrl-C again, or SIGQUIT, ends them at once. SIGTERM and SIGHUP never do, however often they are
sent: schedulers and terminals repeat them. Whatever happens, the folder records how the run ended:
on a full disk, without a terminal, and by `cppmega.launch.agent` if this process is killed.
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

from msgspec import UNSET, structs

from cppmega.errors import CppmegaError
from cppmega.guard import end_record as end_record
from cppmega.host import durable, env, process
from cppmega.host.console import hold_standard_streams
from cppmega.host.terminal import Terminal
from cppmega.launch.agent import FAILURE, ORPHANS, of_torchrun
from cppmega.runs import failures, json_file, liveness
from cppmega.runs.folder import Node
from cppmega.runs.status import Failure, Status

_PERIOD = 0.2
_AGAIN = 1.0
"""Seconds after which another Ctrl-C counts as a second one."""
_KILLED = 30.0
"""Seconds within which torchrun must notice that its ranks were killed."""
_WRITE_AGAIN = 5.0
"""Seconds between two attempts to write what could not be written before."""
_ALIVE = 60.0
"""Seconds between two heartbeats."""
_KEEP = 10.0
"""Seconds of attempts to write how the run ended."""
_FULL = 2**16
"""Free bytes below which a disk counts as full."""
_SOFT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """One torchrun.

    Args:
        node: this host's part of the run.
        words: torchrun's command line; by default the manifest's, in which no secret is recorded.
    """

    def __init__(self, node: Node, words: Sequence[str] = ()) -> None:
        self.node, self.words = node, words
        self.asked = 0.0
        """When a stop was requested; 0: it was not."""
        self.by = ""
        """The signal that requested it."""
        self.now = False
        self.give_up = 0.0
        """When torchrun is killed too, once its ranks were; 0: they were not."""
        self.written = 0.0
        """When writing the status was last attempted."""
        self.trouble = ""
        """Why the status in the folder is out of date."""
        self.folder = _identity(node.path)
        self.status = Status(
            host=socket.gethostname(),
            boot=process.boot(),
            namespace=process.namespace(),
            pid=os.getpid(),
            since=process.started(os.getpid()),
            started=time.time(),
            profiled_steps=node.run.profiled_steps or UNSET,
        )

    def run(self) -> int:
        """Start torchrun, wait for it, and record how it ended.

        Returns:
            The exit status.

        Raises:
            CppmegaError: `run-began-already`, `write-failed`; nothing was started.
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
                process.end_helpers(str(self.node.run.path), map(int, self.status.workers))
            return self._finish(code)

    def _listen(self) -> None:
        for number in (*_SOFT, signal.SIGQUIT):
            ignored = signal.getsignal(number) is signal.SIG_IGN
            # nohup and a shell's & ignore them on purpose, but `cppmega stop` must be heard.
            if not ignored or number in (signal.SIGTERM, signal.SIGQUIT):
                signal.signal(number, self._on_signal)

    def _console(self) -> FileIO:
        """Take charge of the folder. Returns the file that torchrun and its ranks print into."""
        try:
            durable.reserve(self.node.path / FAILURE)
            self.node.write(self.status)
            console = FileIO(self.node.console, "a")
        except OSError as error:
            raise _not_written(self.node, error) from None
        liveness.hold(console)
        return console

    def _torchrun(self, console: FileIO) -> int:
        process.adopt_orphans()  # the ranks of a torchrun that is killed
        try:
            agent = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,  # this process passes on the signals of the terminal
                env={**os.environ, env.RUN.name: str(self.node.run.path)},
            )
        except OSError as error:
            self._say(f"torchrun could not be started: {error}")
            return 1
        self._update(agent=agent.pid, agent_since=process.started(agent.pid))
        while agent.poll() is None:
            self._record_workers(agent.pid)
            if self.now or (self.asked and not self.status.stop):
                self._pass_on()
            if self.give_up and time.monotonic() > self.give_up:
                agent.kill()
            self._heartbeat()
            time.sleep(_PERIOD)
        if agent.returncode < 0:
            self._record_orphans()
        return agent.returncode

    def command(self) -> list[str]:
        """torchrun's command line, with this host's logs."""
        words = self.words or self.node.run.outline.torchrun
        logs = ["--log-dir", str(self.node.logs)]
        # -u: it repeats the ranks' lines into a file, which may be followed.
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
            self._say("ending immediately: the ranks are killed, nothing is saved")
            self._update(stop="now")
            self._signal_workers(signal.SIGKILL)
            self.give_up = time.monotonic() + (_KILLED if self.status.workers else 0)
            return
        self._say(
            f"asked to stop ({self.by}): the ranks save a checkpoint after their step, and end. "
            "Ctrl-C again, or cppmega stop --now, ends them at once"
        )
        self._update(stop="checkpoint")
        if self.status.agent:  # it may have started more ranks while a slow disk took the status
            self._record_workers(self.status.agent)
        self._signal_workers(signal.SIGTERM)
        if not self.status.workers and self.status.agent:  # torchrun has not started any yet
            process.send(self.status.agent, signal.SIGTERM)

    def _update(self, **changes: Any) -> None:
        self.status = structs.replace(self.status, **changes)
        self._write()

    def _signal_workers(self, number: signal.Signals) -> None:
        for pid in self._living():
            process.send(pid, number)

    def _living(self) -> list[int]:
        known = self.status.workers.items()
        return [int(pid) for pid, since in known if process.alive(int(pid), since)]

    def _record_workers(self, agent: int) -> None:
        known = {str(pid): process.started(pid) for pid in process.children(agent)}
        if set(known) - set(self.status.workers):
            self._update(workers={**self.status.workers, **known})
        if known and self.status.first_rank is UNSET:
            place = process.environment(int(next(iter(known))))
            if "RANK" in place:  # not before it has become python
                self._update(first_rank=int(place["RANK"]) - int(place["LOCAL_RANK"]))

    def _record_orphans(self) -> None:
        """Record the ranks of a killed torchrun that were started since the last check.

        A disk that takes seconds to write the status delays that check by as much. A rank that has
        ended already is known by its helpers, which are in its session.
        """
        run = str(self.node.run.path)
        inherited = process.children(os.getpid())
        of_run = (pid for pid in inherited if process.environment(pid).get(env.RUN.name) == run)
        ranks = {session for pid in of_run if (session := process.session(pid)) is not None}
        known = {str(rank): process.started(rank) for rank in ranks}
        self._update(workers={**known, **self.status.workers})

    def _end_orphans(self) -> None:
        """End the ranks that torchrun left behind because it was killed; they have time to save."""
        deadline = time.monotonic() + ORPHANS
        self._signal_workers(signal.SIGTERM)
        while self._living():
            if self.now or time.monotonic() > deadline:
                self._signal_workers(signal.SIGKILL)
                return
            time.sleep(_PERIOD)

    def _finish(self, code: int) -> int:
        if code == 0:
            failure = end_record.missing(self.node)
        else:
            failure = json_file.read(self.node.path / FAILURE, Failure) or of_torchrun(code)
        code = code or int(failure is not None)
        self.status = structs.replace(
            self.status,
            ended=time.time(),
            exit=code,
            workers={},
            failure=UNSET if failure is None else failure,
            note="the disk of the run folder is full" if self._disk_is_full() else UNSET,
        )
        self._write_end()
        self._report_end(code)
        return code if code >= 0 else 128 - code

    def _report_end(self, code: int) -> None:
        run = self.node.run
        failure = failures.described(self.node)
        if failure:
            self._say(failure)
        if self.trouble:
            kept = f"how it ended could not be written into the run folder ({self.trouble})"
            self._say(f"{run.name}: exit status {code}; {kept}")
        else:
            step = run.checkpoint()
            kept = f"; newest checkpoint: step {step}" if step is not None else ""
            self._say(f"{run.name} {self.node.state()}, exit status {code}{kept}")
        self.terminal.finish()

    def _write_end(self) -> None:
        deadline = time.monotonic() + _KEEP
        self._write()
        while self.trouble and self.node.path.is_dir() and time.monotonic() < deadline:
            time.sleep(_PERIOD)
            self._write()

    def _write(self) -> None:
        """Write the status; if that fails, the run continues, and it is attempted again."""
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

    def _heartbeat(self) -> None:
        """Touch the status for readers on other machines, or write what could not be written."""
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
    """Identify a folder independently of what has its name later."""
    with contextlib.suppress(OSError):
        stat = folder.stat()
        return stat.st_dev, stat.st_ino
    return None


def _began_already(node: Node) -> CppmegaError:
    return CppmegaError(
        "run-began-already",
        f"{node.run.name} has a process in charge, or had one: it is {node.state()}.",
        "A second one would overwrite how it ended.",
        f"cppmega logs {node.run.word}; to continue training: cppmega launch --resume "
        f"{node.run.word}",
    )


def _not_written(node: Node, error: OSError) -> CppmegaError:
    return CppmegaError(
        "write-failed",
        f"{node.path} cannot be written: {error.strerror}.",
        "There would be no record of how the run ended. Nothing was started.",
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
