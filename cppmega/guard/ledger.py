"""The ledger of a guarded run: which of its processes hold the guard, and which have trained.

The first process keeps an anonymous file in memory; the others append to it through /proc. Its
address is inherited in the environment, and can be checked: the process that it names must live, be
an ancestor of the reader, and hold such a file. A variable left over in a shell proves nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from cppmega.host import env, process

_FILE = "cppmega-guard"

What = Literal["holds", "joined", "stepped", "excused", "refused"]
"""The process carries the guard; it has joined a process group; one of its steps was checked; it
has ended and needed no step; the guard has refused it."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the ledger."""

    what: What
    pid: int
    above: tuple[int, ...]
    """The ancestors of the process, the nearest first."""
    rank: int | None = None
    """Of a process that joined a group."""
    reason: str = ""
    """Why a process needed no step."""
    where: str = ""
    """Host and rank of a process that was refused."""
    error: dict[str, str] | None = None
    """The parts of its error."""


_address = ""
"""The ledger that this process has opened or joined; a script may change its environment."""


def open_new() -> str:
    """Open a ledger in this process; returns its address."""
    global _address
    number = os.memfd_create(_FILE)
    _address = f"{os.getpid()}.{process.started(os.getpid())}.{number}"
    return _address


def join_or_forget(environ: MutableMapping[str, str], *names: str) -> None:
    """Join the ledger that an environment names, if this process has inherited it.

    Args:
        environ: the environment.
        names: variables that are meaningless otherwise; they are then removed, with a remark.
    """
    global _address
    address = env.GUARDED_BY.read(environ)
    if _path(address) is not None:
        _address = address
        return
    left = [name for name in (*names, env.GUARDED_BY.name) if environ.pop(name, None)]
    if left:
        print(
            f"cppmega: ignoring {', '.join(left)}: left over from another run, which has not "
            "started this process",
            file=sys.stderr,
            flush=True,
        )


def address() -> str:
    """The address of this process's ledger; empty if it has none."""
    return _address


def write(what: What, **details: Any) -> None:
    """Append an entry; does nothing if the first process is gone."""
    path = _path(_address)
    if path is None:
        return
    me = os.getpid()
    line = {"what": what, "pid": me, "above": process.ancestors(me), **details}
    with suppress(OSError), path.open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")  # one write, so that entries stay intact


def below(pid: int) -> list[Entry]:
    """The entries of the processes below a process."""
    path = _path(_address)
    if path is None:
        return []
    entries = [msgspec.json.decode(line, type=Entry) for line in path.read_bytes().splitlines()]
    return [entry for entry in entries if pid in entry.above]


def _path(address: str) -> Path | None:
    """The file at an address; None if the address proves nothing."""
    pid, _, rest = address.partition(".")
    since, _, number = rest.partition(".")
    if not (pid.isdigit() and number.isdigit() and process.alive(int(pid), since)):
        return None
    if int(pid) not in (os.getpid(), *process.ancestors(os.getpid())):
        return None
    path = Path(f"/proc/{pid}/fd/{number}")
    try:
        held = str(path.readlink())
    except OSError:
        return None
    return path if held.startswith(f"/memfd:{_FILE}") else None
