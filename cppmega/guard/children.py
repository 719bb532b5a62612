"""The processes that a guarded one starts: each carries the guard too, or is named in the log.

A Python that ignores its environment, or was given a different one, imports megatron without the
runtime patches. If it is a worker of `multiprocessing`, as data loaders and checkpoint writers are,
the run ends; a helper is only named. Other programs do not matter; a fork has its parent's guard.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.guard import ledger
from cppmega.host import env, process
from cppmega.host.paths import PACKAGE

BOOTSTRAP = str(PACKAGE / "guard" / "bootstrap")
"""The folder of the sitecustomize through which a Python joins."""

_PYTHON = re.compile(r"(python|pypy)[\d.]*t?")
_WORKERS = ("--multiprocessing-fork", "from multiprocessing.forkserver import main")
_SECONDS = 60.0
"""The time in which a process that was started correctly joins, even on a slow file system."""
_MOST = 50
"""The most commands that are named: a script that starts thousands must not fill the log."""

_named: set[tuple[str, ...]] = set()
_first: int | None = None
"""The process that must not be replaced by another program."""


def keep_this_process(where: str) -> None:
    """Refuse to let the process that the run was started as be replaced by another program.

    Args:
        where: how messages name this process.
    """
    global _first
    hooked, _first = _first is not None, os.getpid()

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.exec" and os.getpid() == _first:
            raise CppmegaError(
                "guard-replaced",
                f"{where}: the script replaces this process with {os.fsdecode(args[0])}.",
                "The guard would be gone, and the code of the new program was not checked.",
                "set what it needs before `python -m cppmega.run`, or start it with subprocess.run",
            )

    if not hooked:
        sys.addaudithook(on_event)


def check(where: str) -> None:
    """Inspect all processes below this one.

    Raises:
        CppmegaError: `rank-without-guard`.
    """
    holds = {entry.pid for entry in ledger.below(os.getpid()) if entry.what == "holds"}
    for pid in process.children(os.getpid(), recursive=True):
        words = process.command(pid)
        if pid in holds or not _is_python(words) or process.only_forked(pid):
            continue
        why = f"{env.GUARDED_BY.name} or the guard's folder in PYTHONPATH is not in its environment"
        if _carries(process.environment(pid)):
            if process.age(pid) < _SECONDS:
                continue  # it is still about to join
            why = f"it has not joined within {_SECONDS:.0f} seconds"
        if any(mark in word for word in words for mark in _WORKERS) and not _is_manager(pid):
            raise CppmegaError(
                "rank-without-guard",
                f"{where}: process {pid}, a worker of multiprocessing, does not carry the guard: "
                f"{why}.",
                "It loads data or writes checkpoints with code that was not checked.",
                "leave PYTHONPATH and CPPMEGA_* in os.environ unchanged, and do not call "
                "multiprocessing.set_executable",
            )
        _name(words, why, where)


def this_python() -> str:
    """The environment of this Python, as the sitecustomize recognizes it in a child process."""
    return f"{sys.implementation.cache_tag} {os.path.realpath(sys.prefix)}"


def _carries(environ: dict[str, str]) -> bool:
    folders = environ.get("PYTHONPATH", "").split(os.pathsep)
    return env.GUARDED_BY.read(environ) == ledger.address() and BOOTSTRAP in folders


def _is_python(words: Sequence[str]) -> bool:
    if not words:
        return False
    return _PYTHON.fullmatch(Path(words[0]).name) is not None or words[0] == sys.executable


def _is_manager(pid: int) -> bool:
    """Whether a process only keeps shared objects, as `SyncManager` and its like do.

    It is recognized by its name: multiprocessing does not keep what a process runs.
    """
    multiprocessing = sys.modules.get("multiprocessing")
    workers = multiprocessing.active_children() if multiprocessing is not None else []
    return any(w.pid == pid and w.name.partition("-")[0].endswith("Manager") for w in workers)


def _name(words: Sequence[str], why: str, where: str) -> None:
    if tuple(words) in _named or len(_named) >= _MOST:
        return
    _named.add(tuple(words))
    command = " ".join(" ".join(words).split())[:200]
    print(
        f"cppmega: {where}: a child process does not carry the guard ({why}): {command}",
        file=sys.stderr,
        flush=True,
    )
