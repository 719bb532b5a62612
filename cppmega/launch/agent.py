"""`python -m cppmega.launch.agent NODE TORCHRUN-ARGUMENTS`: torchrun, recording the first error.

The same as `python -m torch.distributed.run`, in a process of its own, so that the process in
charge (`cppmega.launch.supervise`) sees whatever happens to it. If that one is killed, this process
ends the ranks and records how the run ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from msgspec import structs

from cppmega.host import durable, env, process
from cppmega.host.process import end_with_parent
from cppmega.launch.agent_watch import Watch
from cppmega.runs import json_file, liveness
from cppmega.runs.folder import Node
from cppmega.runs.status import Failure

FAILURE = "failure.json"
ORPHANS = 60.0
"""Seconds within which ranks must save and end after torchrun or the process in charge is gone."""
_SEEN = 5.0
"""Seconds within which torchrun notices a killed rank, even on a busy host; it itself kills a rank
no sooner than thirty seconds after another one failed."""


def main() -> NoReturn:
    """Run torchrun; when a rank fails, record which one and why."""
    node, arguments = Node(Path(sys.argv[1])), sys.argv[2:]
    status = node.status()
    parent = (status.pid if status is not None else 0) or os.getppid()  # it may be gone already
    watch = Watch(parent, ORPHANS, lambda: _end_now(node, watch))
    end_with_parent()
    watch.start()
    sys.stdout, sys.stderr = _Unfailing(sys.stdout), _Unfailing(sys.stderr)
    code = _torchrun(node, arguments)
    if watch.orphaned:
        _inherit(node, watch)
    sys.exit(code)


def _torchrun(node: Node, arguments: list[str]) -> int:
    import torch.distributed.run

    torchrun: Any = torch.distributed.run  # it has no types
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = torchrun.parse_args(arguments)
    if hasattr(options, "signals_to_handle"):
        # By default torchrun gives the ranks 30 seconds: too few to save a large model.
        options.signals_to_handle = "SIGINT"
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        _keep(node, first(error.failures))
        return 1
    except SignalException as error:
        _keep(node, of_torchrun(-error.sigval))
        return 1
    return 0


class _Unfailing:
    """A stream that drops what a full disk cannot hold: torchrun would stop copying for good."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()


def _end_now(node: Node, watch: Watch) -> NoReturn:
    """End this process: no ranks are left, and torchrun waits for something else."""
    _keep(node, of_torchrun(-signal.SIGTERM))
    if watch.orphaned:
        _inherit(node, watch)
    os._exit(1)


def _inherit(node: Node, watch: Watch) -> None:
    """Record the end of a run whose process in charge was killed."""
    process.end_helpers(os.environ.get(env.RUN.name, ""), watch.ranks)
    status = node.status()
    if status is None or liveness.in_charge(status):
        return
    message = "the launcher was killed; its ranks were asked to save a checkpoint and end"
    failure = Failure(exit=None, message=message)
    ended = structs.replace(status, ended=time.time(), exit=None, workers={}, failure=failure)
    with contextlib.suppress(OSError):  # the state shows as much
        node.write(ended)


def _keep(node: Node, failure: Failure) -> None:
    with contextlib.suppress(OSError):  # the process in charge sees the exit status
        durable.write(node.path / FAILURE, json_file.plain(failure))


def of_torchrun(code: int) -> Failure:
    """The failure of torchrun itself, if no rank has one."""
    name = signal.Signals(-code).name if code < 0 else ""
    how = f"signal {name}" if name else f"exit status {code}"
    return Failure(exit=code, signal=name, message=f"torchrun itself ended with {how}")


def first(failures: dict[int, Any]) -> Failure:
    """The rank that failed first, by the exact times in the error files that have one.

    A killed rank (SIGKILL) leaves no error file, so the error that its end caused in another rank
    may have the earlier time. No error of another rank would kill it that soon: it failed first.
    """
    rank = min(failures, key=lambda rank: (_time(failures[rank]), rank))
    failure = failures[rank]
    details = _details(failure)
    return Failure(
        rank=rank,
        local_rank=failure.local_rank,
        exit=failure.exitcode,
        signal=failure.signal_name() if failure.exitcode < 0 else "",
        message=str(details.get("py_callstack") or details.get("message", "")),
        others=tuple(sorted(set(failures) - {rank})),
    )


def _time(failure: Any) -> float:
    exact = _details(failure).get("time")
    if exact is not None:
        return float(exact)
    killed = failure.exitcode == -signal.SIGKILL
    return float(failure.timestamp) - (_SEEN if killed else 0)


def _details(failure: Any) -> dict[str, Any]:
    """The error that the rank wrote; empty if a signal ended it or it exited by itself."""
    message = json_file.read_object(Path(failure.error_file)).get("message", "")
    if not isinstance(message, dict):
        return {"message": message}
    return {"message": message.get("message", ""), **(message.get("extraInfo") or {})}


if __name__ == "__main__":
    main()
