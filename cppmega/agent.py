"""`python -m cppmega.agent NODE TORCHRUN-ARGUMENTS`: torchrun, which keeps who failed first.

The same as `python -m torch.distributed.run`; it is a process of its own so that whatever happens
to it is seen by the one in charge (`cppmega.supervise`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from cppmega import process
from cppmega.process import end_with_parent
from cppmega.run_folder import Node, write_json

FAILURE = "failure.json"


def main() -> None:
    """Run torchrun; when a rank fails, write down which one and why."""
    node, arguments = Node(Path(sys.argv[1])), sys.argv[2:]
    signal.signal(signal.SIGTERM, lambda number, frame: _end(node))
    end_with_parent()
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
        write_json(node.path / FAILURE, first(error.failures))
        sys.exit(1)
    except SignalException as error:
        write_json(node.path / FAILURE, of_torchrun(-error.sigval))
        sys.exit(1)


def _end(node: Node) -> None:
    """SIGTERM: the ranks save and end, and torchrun after them; without ranks it ends now."""
    ranks = process.children(os.getpid())
    for rank in ranks:
        process.send(rank, signal.SIGTERM)
    if not ranks:
        write_json(node.path / FAILURE, of_torchrun(-signal.SIGTERM))
        os._exit(1)


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
    except (OSError, ValueError, KeyError):
        return {}
    return found if isinstance(found, dict) else {"message": found}


if __name__ == "__main__":
    main()
