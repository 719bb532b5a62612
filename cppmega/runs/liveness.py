"""Whether the processes of a run are alive, as far as that can be determined from here.

On the same machine a process is identified by number, start time and boot, since numbers are
reused. A container has its own numbers, so a lock decides there: the kernel releases it when its
holder ends. From another machine there is only the time since the process in charge last touched
its status.
"""

from __future__ import annotations

import fcntl
import socket
import time
from io import FileIO
from pathlib import Path

from msgspec import UNSET

from cppmega.host import process
from cppmega.runs.status import Status

_SILENT = 300.0
"""Seconds without a sign of life after which it is reported; there should be one every minute."""

_INSTANT = 10.0
"""Seconds for which a reader may hold the lock of a console on a machine under load."""


def here(status: Status) -> bool:
    """Whether its processes are on this machine, going by the host name."""
    return status.host == socket.gethostname()


def reachable(status: Status) -> bool:
    """Whether its process numbers mean the same here: same boot, same container."""
    same = status.namespace is UNSET or status.namespace == process.namespace()
    return same and status.boot == process.boot()


def in_charge(status: Status) -> bool:
    """Whether the process in charge of a run on this host is alive."""
    return reachable(status) and process.alive(status.pid, status.since)


def left_behind(status: Status) -> list[int]:
    """The living processes of torchrun and its ranks on this host, torchrun first."""
    if not reachable(status):
        return []
    ranks = [(int(pid), since) for pid, since in status.workers.items() if pid.isdigit()]
    known = [(status.agent or 0, status.agent_since or ""), *ranks]
    return [pid for pid, since in known if process.alive(pid, since)]


def in_another_container(status: Status, locked: Path) -> bool:
    """Whether it runs on this machine in a container, where its process numbers mean nothing."""
    return not reachable(status) and status.boot == process.boot() and held(locked)


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
        return True  # a file system without locks cannot show that it ended
    return False


def hold(file: FileIO) -> None:
    """Lock an open file for as long as this process, or one that inherits it, lives."""
    deadline = time.monotonic() + _INSTANT
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:  # `held` acquires it for an instant
            time.sleep(0.01)
        except OSError:
            return  # a file system without locks


def silence(status_file: Path) -> float:
    """Seconds since the last heartbeat; 0 if that gives no reason to think that it is dead."""
    try:
        age = time.time() - status_file.stat().st_mtime
    except OSError:
        return 0.0
    return age if age > _SILENT else 0.0
