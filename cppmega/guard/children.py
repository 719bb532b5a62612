"""The processes that a guarded one starts: each carries the guard too, or is named in the log.

A Python that ignores its environment, or was given a different one, imports megatron without the
runtime patches. If it is a helper it is only named; if it is a worker of `multiprocessing`, as data
loaders and checkpoint writers are, the run ends. Other programs, such as compilers and
`nvidia-smi`, do not matter; a fork has the guard of its parent.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.guard import ledger
from cppmega.host import env, process
from cppmega.host.paths import PACKAGE

BOOTSTRAP = str(PACKAGE / "guard" / "bootstrap")
"""The folder of the sitecustomize through which a Python joins."""

_PYTHON = re.compile(r"(python|pypy)[\d.]*t?")
_DEAF = frozenset("SIE")
"""Options under which Python ignores PYTHONPATH or sitecustomize."""
_WORKERS = ("--multiprocessing-fork", "from multiprocessing.forkserver import main")
_SECONDS = 60.0
"""The time in which a process that was started correctly joins, even on a slow file system."""
_MOST = 50
"""The most commands that are named: a script that starts thousands must not fill the log."""

_named: set[tuple[str, ...]] = set()
_first: int | None = None
"""The process that must not be replaced by another program."""
_watched: list[str] = []


def watch(where: str, *, first: bool) -> None:
    """Inspect every command that this process and its forks start.

    Args:
        where: how messages name this process.
        first: whether this is the process that the run was started as.
    """
    global _first
    _first = os.getpid() if first else _first
    if not _watched:
        sys.addaudithook(_on_event)
    _watched[:] = [where]


def check(where: str) -> None:
    """Inspect all processes below this one, including those that were not started by Python.

    Raises:
        CppmegaError: `rank-without-guard`.
    """
    entries = ledger.below(os.getpid())
    holds = {entry.pid for entry in entries if entry.what == "holds"}
    for pid in process.children(os.getpid(), recursive=True):
        words = process.command(pid)
        if pid in holds or not _is_python(words) or process.only_forked(pid):
            continue
        why = _reason_without_guard(words, process.environment(pid))
        if not why and process.age(pid) < _SECONDS:
            continue  # it is still about to join
        why = why or f"it has not joined within {_SECONDS:.0f} seconds"
        if _is_worker(pid, words):
            raise CppmegaError(
                "rank-without-guard",
                f"{where}: process {pid}, a worker of multiprocessing, does not carry the guard: "
                f"{why}.",
                "It loads data or writes checkpoints with code that was not checked.",
                "leave PYTHONPATH and CPPMEGA_* in os.environ unchanged, and do not call "
                "multiprocessing.set_executable",
            )
        _name(words, why, where)


def _is_worker(pid: int, words: Sequence[str]) -> bool:
    marked = any(mark in word for word in words for mark in _WORKERS)
    return marked and not _is_manager(pid)


def _is_manager(pid: int) -> bool:
    """Whether a process only keeps shared objects, as `SyncManager` and its like do.

    It is recognized by its name: multiprocessing does not keep what a process runs.
    """
    multiprocessing = sys.modules.get("multiprocessing")
    workers = multiprocessing.active_children() if multiprocessing is not None else []
    return any(w.pid == pid and w.name.partition("-")[0].endswith("Manager") for w in workers)


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        executable, words, _, environ = args
        _inspect([executable, *_words(words)[1:]], environ)
    elif event == "os.posix_spawn":
        executable, words, environ = args
        _inspect([executable, *_words(words)[1:]], environ)
    elif event == "os.exec":
        executable, words, environ = args
        _inspect([executable, *_words(words)[1:]], environ)
        if os.getpid() == _first:
            raise CppmegaError(
                "guard-replaced",
                f"{_watched[0]}: the script replaces this process with {os.fsdecode(executable)}.",
                "The guard would be gone, and the code of the new program was not checked.",
                "set what it needs before `python -m cppmega.run`, or start it with subprocess.run",
            )


def _words(args: Any) -> list[Any]:
    return [args] if isinstance(args, str | bytes | os.PathLike) else list(args)


def _inspect(command: Sequence[Any], environ: Mapping[Any, Any] | None) -> None:
    """Name a command that starts a Python without the guard."""
    try:
        words = [os.fsdecode(word) for word in command]
        variables = os.environ if environ is None else environ
        known = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
    except (TypeError, AttributeError):
        return  # not a command: Python raises that to its caller
    if _is_python(words):
        why = _reason_without_guard(words, known)
        if why:
            _name(words, why, _watched[0])


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


def this_python() -> str:
    """The environment of this Python, as the sitecustomize recognizes it in a child process."""
    return f"{sys.implementation.cache_tag} {os.path.realpath(sys.prefix)}"


def _is_this_python(word: str) -> bool:
    """Whether a command starts this environment's Python; a link to its base counts as it."""
    found = Path(shutil.which(word) or word)
    homes = (found.parent.resolve().parent, found.resolve().parent.parent)
    return word == sys.executable or Path(sys.prefix).resolve() in homes


def _is_python(words: Sequence[str]) -> bool:
    if not words:
        return False
    return _PYTHON.fullmatch(Path(words[0]).name) is not None or words[0] == sys.executable


def _reason_without_guard(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """The reason why a Python that is started like this does not join; empty if it does."""
    deaf = sorted(_options(words) & _DEAF)
    if deaf:
        return f"python -{''.join(deaf)}"
    if not _is_this_python(words[0]):
        return "it is a Python of another environment"
    own = {env.GUARDED_BY: ledger.address(), env.PYTHON: this_python()}
    for variable, value in own.items():
        if variable.read(environ) != value:
            return f"{variable.name} is not in its environment"
    for folder in environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder == BOOTSTRAP:
            return ""
        if folder and (Path(folder) / "sitecustomize.py").is_file():
            return f"the sitecustomize in {folder} comes first in its PYTHONPATH"
    return f"{BOOTSTRAP} is not in its PYTHONPATH"


def _options(words: Sequence[str]) -> set[str]:
    """The letters of Python's own options, before the script."""
    found: set[str] = set()
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-") or word == "-":
            break
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(rest, None)
            continue
        for at, letter in enumerate(word[1:], 2):
            found.add(letter)
            if letter in "cm":
                return found
            if letter in "WX":
                if at == len(word):
                    next(rest, None)
                break
    return found
