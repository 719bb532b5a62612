"""Whether the processes of a run live, as far as it can be told from here.

On the same machine number, start time and boot tell: numbers are used again. A container has its
own numbers, so there a lock tells, which the kernel takes back from whatever ends. From another
machine there is only the time since the process in charge last touched its status.
"""

from __future__ import annotations

import fcntl
import socket
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from cppmega.host import process

_SILENT = 300.0
"""Seconds without a sign of life that are worth a word; there should be one every minute."""


def here(status: Mapping[str, Any]) -> bool:
    """Whether its processes are on this machine, by the name of it."""
    return bool(status.get("host") == socket.gethostname())


def reachable(status: Mapping[str, Any]) -> bool:
    """Whether its numbers of processes mean the same here: same boot, same container."""
    mine = process.namespace()
    same = status.get("namespace", mine) == mine
    return same and bool(status.get("boot") == process.boot())


def in_charge(status: Mapping[str, Any]) -> bool:
    """Whether the process in charge lives; of a run on this host."""
    return reachable(status) and _lives(status.get("pid"), status.get("since"))


def left_behind(status: Mapping[str, Any]) -> list[int]:
    """Those of torchrun and its ranks that live, torchrun first; of a run on this host."""
    if not reachable(status):
        return []
    known = {status.get("agent"): status.get("agent_since"), **status.get("workers", {})}
    return [int(pid) for pid, since in known.items() if _lives(pid, since)]


def _lives(pid: Any, since: Any) -> bool:
    return str(pid).isdigit() and process.alive(int(pid), str(since or ""))


def in_another_container(status: Mapping[str, Any], locked: Path) -> bool:
    """Whether something of it lives on this machine where its numbers mean nothing to us."""
    return not reachable(status) and status.get("boot") == process.boot() and held(locked)


def held(locked: Path) -> bool:
    """Whether a process on this machine holds the lock of a run's console."""
    try:
        with locked.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return True  # a file system without locks: nothing speaks against it
    return False


def hold(file: FileIO) -> None:
    """Lock an open file for as long as this process, or one that inherits it, lives."""
    for _ in range(20):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:  # taken for an instant by `held`
            time.sleep(0.01)
        except OSError:
            return  # a file system without locks


def silence(status_file: Path) -> float:
    """Seconds since the last sign of life; 0 where that is no reason to doubt it."""
    try:
        age = time.time() - status_file.stat().st_mtime
    except OSError:
        return 0.0
    return age if age > _SILENT else 0.0
