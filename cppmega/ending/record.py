"""What a launched rank leaves when it has come to its end: a status of 0 without it proves nothing.

`os._exit(0)` passes by every check that a process could make at its end; so the process in charge
of a run looks for the records of its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from cppmega.host import env, process
from cppmega.runs.folder import Node, Run
from cppmega.runs.manifest import read_json

_FOLDER = "ends"
_ROOM = 2048
"""Bytes of a record."""


def node_of_this_rank() -> Node | None:
    """The host's part of the launch that started this process; None: no launch did.

    A variable that is left over in a shell names a run whose torchrun is not our parent.
    """
    folder = env.RUN.read()
    for node in Run(folder).nodes() if folder is not None else ():
        status = node.status()
        if status.get("agent") == os.getppid() and status.get("boot") == process.boot():
            return node
    return None


def begin(node: Node) -> None:
    """A rank begins: it takes the room for its record, which a disk may not have at the end."""
    with contextlib.suppress(OSError):
        _file(node, _local_rank()).parent.mkdir(exist_ok=True)
        _file(node, _local_rank()).write_bytes(_padded({"pid": os.getpid()}))


def write(node: Node, status: int, reason: str) -> None:
    """A rank has ended and was looked at.

    Args:
        status: its exit status.
        reason: why no step of it was seen; empty where steps were.
    """
    record = {"pid": os.getpid(), "status": status, "reason": reason[:200], "time": time.time()}
    with contextlib.suppress(OSError), _file(node, _local_rank()).open("r+b") as file:
        file.write(_padded(record))


def _padded(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode().ljust(_ROOM)


def missing(node: Node) -> dict[str, Any]:
    """The failure of the first rank that ended with 0 and was not looked at; empty: none."""
    manifest, status = node.run.manifest, node.status()
    if "cppmega.run" not in manifest.get("torchrun", ()):
        return {}  # ranks without the guard leave no records
    if not node.path.exists():
        return {}  # somebody has removed the run folder, records and all
    for local_rank in range(manifest.get("nproc", 0)):
        record = read_json(_file(node, local_rank))
        if record.get("status") == 0:
            continue
        said = "was refused by the guard" if record.get("status") else "ended without an end record"
        return {
            "rank": status.get("first_rank", 0) + local_rank,
            "local_rank": local_rank,
            "exit": 0,
            "signal": "",
            "message": f"the rank {said}, and its exit status was 0: its script called os._exit, "
            "or another program took its place",
        }
    return {}


def _file(node: Node, local_rank: int) -> Path:
    return node.path / _FOLDER / f"{local_rank}.json"


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
