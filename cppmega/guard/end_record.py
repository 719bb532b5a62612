"""The record that a launched rank has reached its end, since a status of 0 alone proves nothing.

`os._exit(0)` bypasses every check that a process could make at its end, so the process in charge of
a run looks for the records of its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cppmega.host import env, process
from cppmega.runs import json_file

if TYPE_CHECKING:  # a rank that no launch has started needs nothing of a run folder
    from cppmega.runs.folder import Node
    from cppmega.runs.status import Failure

_FOLDER = "ends"
_ROOM = 2048
"""Bytes of a record."""
_REASON = 200
"""Characters of a reason that fit into it."""


class EndRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one rank ended."""

    pid: int
    status: int | None = None
    """Its exit status; None: it has not ended, or was not checked at its end."""
    reason: str = ""
    """Why no step of it was seen; empty if steps were."""
    time: float = 0.0


def node_of_this_rank() -> Node | None:
    """The host's part of the launch that started this process; None if no launch did.

    A variable that is left over in a shell names a run whose torchrun is not our parent. Its
    command line names the folder from the start, whereas the process in charge may still be
    waiting for the disk to store the status that records which torchrun is its own.
    """
    folder = env.RUN.read()
    if folder is None:
        return None
    from cppmega.runs.folder import Run

    words = process.command(os.getppid())
    return next((node for node in Run(folder).nodes() if str(node.path) in words), None)


def begin(node: Node) -> None:
    """Reserve disk space for this rank's record, which may not be available at the end."""
    with contextlib.suppress(OSError):
        _file(node, _local_rank()).parent.mkdir(exist_ok=True)
        _file(node, _local_rank()).write_bytes(_padded(EndRecord(pid=os.getpid())))


def write(node: Node, status: int, reason: str) -> None:
    """Record that this rank has ended and was checked.

    Args:
        status: its exit status.
        reason: why no step of it was seen; empty if steps were.
    """
    record = EndRecord(pid=os.getpid(), status=status, reason=reason[:_REASON], time=time.time())
    with contextlib.suppress(OSError), _file(node, _local_rank()).open("r+b") as file:
        file.write(_padded(record))


def _padded(record: EndRecord) -> bytes:
    return json.dumps(json_file.plain(record)).encode().ljust(_ROOM)


def missing(node: Node) -> Failure | None:
    """The failure of the first rank that ended with 0 and was not checked; None if all were."""
    outline, status = node.run.outline, node.status()
    if "cppmega.run" not in outline.torchrun:
        return None  # ranks without the guard leave no records
    if not node.path.exists():
        return None  # the run folder was removed, records and all
    first = (status and status.first_rank) or 0
    for local_rank in range(outline.nproc or 0):
        record = json_file.read(_file(node, local_rank), EndRecord)
        if record is None or record.status != 0:
            return _unchecked(first + local_rank, local_rank, record)
    return None


def _unchecked(rank: int, local_rank: int, record: EndRecord | None) -> Failure:
    from cppmega.runs.status import Failure

    refused = record is not None and record.status
    how = "was refused by the guard" if refused else "ended without an end record"
    return Failure(
        rank=rank,
        local_rank=local_rank,
        exit=0,
        message=f"the rank {how}, and its exit status was 0: its script called os._exit, or "
        "another program took its place",
    )


def _file(node: Node, local_rank: int) -> Path:
    return node.path / _FOLDER / f"{local_rank}.json"


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
