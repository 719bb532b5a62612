"""The workers that a guarded process starts: each carries the guard too.

A Python that ignores its environment, or was given a different one, imports megatron without the
runtime patches. If it is a worker of `multiprocessing`, as data loaders and checkpoint writers are,
the run ends. Other programs do not matter; a fork has its parent's guard.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.guard import ledger
from cppmega.host import env, process
from cppmega.host.paths import PACKAGE

BOOTSTRAP = str(PACKAGE / "guard" / "bootstrap")
"""The folder of the sitecustomize through which a Python joins."""

_SECONDS = 60.0
"""The time in which a process that was started correctly joins, even on a slow file system."""

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
    """Inspect the workers that `multiprocessing` has started here.

    Raises:
        CppmegaError: `rank-without-guard`.
    """
    multiprocessing = sys.modules.get("multiprocessing")
    workers = multiprocessing.active_children() if multiprocessing is not None else []
    if not workers:
        return
    holds = {entry.pid for entry in ledger.below(os.getpid()) if entry.what == "holds"}
    for worker in workers:
        pid = process.forked_from(worker.pid)
        # A manager only keeps shared objects. Its name shows it: what a process runs is not kept.
        is_manager = worker.name.partition("-")[0].endswith("Manager")
        if pid in (os.getpid(), *holds) or is_manager or not process.started(pid):
            continue
        why = f"{env.GUARDED_BY.name} or the guard's folder in PYTHONPATH is not in its environment"
        if _carries(process.environment(pid)):
            if process.age(pid) < _SECONDS:
                continue  # it is still about to join
            why = f"it has not joined within {_SECONDS:.0f} seconds"
        raise CppmegaError(
            "rank-without-guard",
            f"{where}: process {pid}, a worker of multiprocessing, does not carry the guard: "
            f"{why}.",
            "It loads data or writes checkpoints with code that was not checked.",
            "leave PYTHONPATH and CPPMEGA_* in os.environ unchanged, and do not call "
            "multiprocessing.set_executable",
        )


def this_python() -> str:
    """The environment of this Python, as the sitecustomize recognizes it in a child process."""
    return f"{sys.implementation.cache_tag} {os.path.realpath(sys.prefix)}"


def _carries(environ: dict[str, str]) -> bool:
    folders = environ.get("PYTHONPATH", "").split(os.pathsep)
    return env.GUARDED_BY.read(environ) == ledger.address() and BOOTSTRAP in folders
