"""`python -m cppmega.launch.agent NODE TORCHRUN-ARGUMENTS`: torchrun, which keeps who failed first.

The same as `python -m torch.distributed.run`; it is a process of its own so that whatever happens
to it is seen by the one in charge (`cppmega.launch.supervise`). Where that one is killed, this
process ends the ranks and writes down how the run ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from cppmega.host import durable, env, process
from cppmega.host.process import end_with_parent
from cppmega.launch.agent_watch import Watch
from cppmega.runs import liveness
from cppmega.runs.folder import Node

FAILURE = "failure.json"
ORPHANS = 60.0
"""Seconds that ranks get to save and end after torchrun or the process in charge is gone."""


def main() -> NoReturn:
    """Run torchrun; when a rank fails, write down which one and why."""
    node, arguments = Node(Path(sys.argv[1])), sys.argv[2:]
    parent = int(node.status().get("pid", os.getppid()))  # it may be gone already
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
        # torchrun's own way gives the ranks 30 seconds: too few to save a large model.
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
    """A stream that loses what a full disk does not take: torchrun would stop copying for good."""

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
    """There are no ranks, or none any more; torchrun waits for something else."""
    _keep(node, of_torchrun(-signal.SIGTERM))
    if watch.orphaned:
        _inherit(node, watch)
    os._exit(1)


def _inherit(node: Node, watch: Watch) -> None:
    """Write down the end of a run whose process in charge was killed."""
    process.end_helpers(os.environ.get(env.RUN.name, ""), watch.ranks)
    status = node.status()
    if liveness.in_charge(status):
        return
    said = "the launcher was killed; its ranks were asked to save a checkpoint and end"
    failure = {"rank": None, "exit": None, "signal": "", "message": said}
    ended = {"ended": time.time(), "exit": None, "workers": {}, "failure": failure}
    with contextlib.suppress(OSError):  # then its state says as much
        node.write({**status, **ended})


def _keep(node: Node, failure: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the process in charge sees the exit status
        durable.write(node.path / FAILURE, failure)


def of_torchrun(code: int) -> dict[str, Any]:
    """The failure where no rank has one: torchrun itself ended."""
    name = signal.Signals(-code).name if code < 0 else ""
    how = f"signal {name}" if name else f"exit status {code}"
    said = f"torchrun itself ended with {how}"
    return {"rank": None, "exit": code, "signal": name, "message": said}


def first(failures: dict[int, Any]) -> dict[str, Any]:
    """The rank that failed first, by the exact times in the error files where there are some."""
    rank = min(failures, key=lambda rank: (_time(failures[rank]), rank))
    failure = failures[rank]
    return {
        "rank": rank,
        "local_rank": failure.local_rank,
        "exit": failure.exitcode,
        "signal": failure.signal_name() if failure.exitcode < 0 else "",
        "message": _message(failure),
        "others": sorted(set(failures) - {rank}),
    }


def _time(failure: Any) -> float:
    said = _said(failure)
    return float(said.get("extraInfo", {}).get("time", failure.timestamp))


def _message(failure: Any) -> str:
    said = _said(failure)
    return str(said.get("extraInfo", {}).get("py_callstack") or said.get("message") or "")


def _said(failure: Any) -> dict[str, Any]:
    """What the rank wrote; nothing where a signal ended it or it exited by itself."""
    try:
        found = json.loads(Path(failure.error_file).read_text())["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {"message": found}


if __name__ == "__main__":
    main()
