"""The process in charge of one host's part of a run: starts torchrun, passes on a stop.

It lives in the tmux session or in the terminal; torchrun and its ranks have sessions of their own,
so that Ctrl-C or a lost terminal reaches this process alone. SIGINT, SIGTERM and SIGHUP ask the
ranks to save a checkpoint and end (SIGTERM, which Megatron's --exit-signal-handler waits for);
Ctrl-C again, or SIGQUIT, ends them at once. SIGTERM and SIGHUP never do, however often they come:
schedulers and terminals repeat themselves. Whatever happens, the end is kept in the folder.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cppmega import end_record, process
from cppmega.agent import FAILURE, of_torchrun
from cppmega.failures import said_of
from cppmega.run_folder import Node
from cppmega.run_manifest import read_json

_PERIOD = 0.2
_ORPHANS = 60.0
"""Seconds that ranks get to save and end after their torchrun is gone."""
_AGAIN = 1.0
"""Seconds after which a second Ctrl-C is meant as one."""
_SOFT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """One torchrun."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.asked = 0.0
        """When somebody asked to stop; 0: nobody has."""
        self.now = False
        self.shown = 0
        self.status: dict[str, Any] = {
            "host": socket.gethostname(),
            "boot": process.boot(),
            "pid": os.getpid(),
            "since": process.started(os.getpid()),
            "started": time.time(),
            "workers": {},
            "stop": "",
            "ended": None,
            "exit": None,
        }

    def run(self) -> int:
        """Start, wait, write down the end. Answers the exit status."""
        self._write()
        for number in (*_SOFT, signal.SIGQUIT):
            ignored = signal.getsignal(number) is signal.SIG_IGN
            # nohup and a shell's & mean it, but what `cppmega stop` sends was asked for.
            if not ignored or number in (signal.SIGTERM, signal.SIGQUIT):
                signal.signal(number, self._on_signal)
        with self.node.console.open("ab", buffering=0) as console:
            agent = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,  # signals of the terminal are ours to pass on
                env={**os.environ, "CPPMEGA_RUN": str(self.node.run.path)},
            )
            self.status["agent"] = agent.pid
            self._write()
            while agent.poll() is None:
                self._see_workers(agent.pid)
                if self.now or (self.asked and not self.status["stop"]):
                    self._pass_on()
                self._show()
                time.sleep(_PERIOD)
        self._end_orphans()
        if agent.returncode:
            self._end_helpers()
        return self._finish(agent.returncode)

    def command(self) -> list[str]:
        """torchrun with this host's logs."""
        words = self.node.run.manifest["torchrun"]
        logs = ["--log-dir", str(self.node.logs)]
        # -u: it repeats the ranks' lines into a file, and somebody follows that file.
        return [sys.executable, "-u", "-m", "cppmega.agent", str(self.node.path), *logs, *words]

    def _on_signal(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        again = bool(self.asked) and now - self.asked > _AGAIN
        if number == signal.SIGQUIT or (number == signal.SIGINT and again):
            self.now = True
        self.asked = self.asked or now

    def _pass_on(self) -> None:
        if self.now:
            self.now = False
            self._say("ending at once: the ranks are killed, nothing is saved")
            self._mark("now")
            self._signal_workers(signal.SIGKILL)
            return
        self._say(
            "asked to stop: the ranks save a checkpoint after their step, and end. "
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
        for pid, since in self.status["workers"].items():
            if process.alive(int(pid), since):
                process.send(int(pid), number)

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
        deadline = time.monotonic() + _ORPHANS
        while any(process.alive(int(p), s) for p, s in self.status["workers"].items()):
            if self.now or time.monotonic() > deadline:
                self._signal_workers(signal.SIGKILL)
                return
            self._show()
            time.sleep(_PERIOD)

    def _end_helpers(self) -> None:
        """What a rank had started does not hear of its end: a writer of checkpoints, say."""
        mine = str(self.node.run.path)
        for rank in self.status["workers"]:  # torchrun gives each a session of its own
            for pid in process.of_session(int(rank)):
                if process.environment(pid).get("CPPMEGA_RUN") == mine:  # numbers are used again
                    process.send(pid, signal.SIGKILL)

    def _finish(self, code: int) -> int:
        self._show()
        failure = read_json(self.node.path / FAILURE) if code else end_record.missing(self.node)
        if code and not failure:
            failure = of_torchrun(code)
        code = code or int(bool(failure))
        self.status |= {"ended": time.time(), "exit": code, "workers": {}}
        if code:
            self.status["failure"] = failure
        self._write()
        run = self.node.run
        said = said_of(self.node)
        if said:
            self._say(said)
        step = run.checkpoint()
        kept = f"; newest checkpoint: step {step}" if step is not None else ""
        self._say(f"{run.name} {self.node.state()}, exit status {code}{kept}")
        return code if code >= 0 else 128 - code

    def _write(self) -> None:
        self.node.write(self.status)

    def _show(self) -> None:
        """Copy to the terminal what torchrun and its ranks have printed meanwhile."""
        with self.node.console.open("rb") as console:
            console.seek(self.shown)
            new = console.read()
        self.shown += len(new)
        _to_terminal(new)

    def _say(self, text: str) -> None:
        line = f"cppmega: {text}\n".encode()
        with self.node.console.open("ab") as console:
            console.write(line)
        self._show()


def _to_terminal(data: bytes) -> None:
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError:
        # The terminal is gone; the run is not. What is left of it must not fail at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """`python -m cppmega.supervise NODE`, as the tmux session runs it."""
    sys.exit(Supervisor(Node(Path(sys.argv[1]))).run())


if __name__ == "__main__":
    main()
