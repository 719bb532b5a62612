"""Run code of pages and recipes in this process; any failure becomes a named error.

Pages are loaded, edit nodes and answer questions inside the command that uses them. They must not
end the process, run forever, start another program, write a file, or leave the process changed.
This module catches accidents. It is not a sandbox: code that means to evade it can.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from cppmega.errors import CppmegaError

LIMIT = 30.0
"""Seconds that a page has for one answer, which should take milliseconds."""

Failed = Callable[[str], CppmegaError]
"""Builds the caller's error from a predicate such as `starts a process (os.system)`."""

_FORBIDDEN = {
    **dict.fromkeys(("os.kill", "os.killpg"), "sends a signal"),
    **dict.fromkeys(("os.exec", "os.fork", "os.forkpty", "os.posix_spawn"), "starts a process"),
    **dict.fromkeys(("os.system", "subprocess.Popen", "pty.spawn"), "starts a process"),
    **dict.fromkeys(("socket.connect", "socket.bind", "socket.sendto"), "uses the network"),
    **dict.fromkeys(("os.chdir", "os.fchdir", "resource.setrlimit"), "changes the process"),
}
_WRITES = {
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"),
    *("os.chmod", "os.chown", "os.utime", "shutil.rmtree", "shutil.copyfile", "shutil.move"),
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Forbidden(BaseException):
    """Raised when page code does something forbidden; `except Exception` does not catch it."""


@dataclass
class _Watch:
    """The supervision while code of a page runs."""

    others: frozenset[int | None]
    """Threads that existed before, which are not supervised."""
    done: str = ""
    """The first forbidden action; kept because the code may catch `_Forbidden`."""

    def refuse(self, what: str, *_: object, **__: object) -> NoReturn:
        self.done = self.done or what
        raise _Forbidden(what)


_watch: _Watch | None = None
_hooked = False


@contextmanager
def contained(failed: Failed, seconds: float | None = None) -> Iterator[None]:
    """Supervise code of a page or a recipe.

    A `CppmegaError` and Ctrl-C pass through; every other failure becomes the caller's error.

    Raises:
        CppmegaError: built by `failed` from a description of what the code did.
    """
    global _watch, _hooked
    if _watch is not None:  # a recipe that a page loads is supervised with the page
        with converted(failed):
            yield
        return
    if not _hooked:
        _hooked = True
        sys.addaudithook(_audit)  # cannot be removed, and is idle outside of supervision
    here = threading.get_ident()
    others = (thread.ident for thread in threading.enumerate() if thread.ident != here)
    watch = _watch = _Watch(frozenset(others))
    before = _state()
    raised: CppmegaError | None = None
    try:
        to_stderr = contextlib.redirect_stdout(sys.stderr)
        with _no_exits(watch), _time_limit(watch, seconds or LIMIT), to_stderr, converted(failed):
            yield
    except CppmegaError as error:
        raised = error
    except _Forbidden as error:  # perhaps from a stand-in that it kept from an earlier call
        watch.done = watch.done or str(error)
    finally:
        _watch = None
        left = _restore(before)
    if watch.done or left:
        raise failed(watch.done or left) from raised
    if raised is not None:
        raise raised


@contextmanager
def converted(failed: Failed) -> Iterator[None]:
    """Turn any exception into the caller's error, without supervision."""
    try:
        yield
    except (CppmegaError, _Forbidden, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise failed(f"raises {type(error).__name__}: {error}") from error


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    watch = _watch
    if watch is None or threading.get_ident() in watch.others:
        return
    if event in _FORBIDDEN:
        watch.refuse(f"{_FORBIDDEN[event]} ({event})")
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & _WRITING and not _harmless(path):
            watch.refuse(f"writes the file {path}")
    elif event in _WRITES and not _harmless(arguments[0]):
        watch.refuse(f"changes the file {arguments[0]} ({event})")


def _harmless(path: object) -> bool:
    """Whether a path is Python's bytecode, a file that is already open, or the null device."""
    if isinstance(path, int) or path == os.devnull or "__pycache__" in str(path):
        return True
    return sys.pycache_prefix is not None and str(path).startswith(sys.pycache_prefix)


_exit = os._exit


@contextmanager
def _no_exits(watch: _Watch) -> Iterator[None]:
    """Replace the functions that end a process without an audit event."""
    abort = os.abort
    for name in ("_exit", "abort"):
        setattr(os, name, partial(watch.refuse, f"ends the process (os.{name})"))
    try:
        yield
    finally:
        os._exit, os.abort = _exit, abort


@contextmanager
def _time_limit(watch: _Watch, seconds: float) -> Iterator[None]:
    """Interrupt code that does not end. A timer that the caller has set continues afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        watch.refuse(f"has not finished after {seconds:g} seconds")

    began = time.monotonic()
    # No timer runs while the handler changes: the machine may take any time for the next line.
    rest, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, interrupted)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        left = max(rest - (time.monotonic() - began), 0.01) if rest else 0
        signal.setitimer(signal.ITIMER_REAL, left, interval)


def _state() -> tuple[dict[str, str], list[str], list[str]]:
    return dict(os.environ), [*sys.path], [*sys.argv]


def _restore(before: tuple[dict[str, str], list[str], list[str]]) -> str:
    """Undo changes to the environment and to Python's path; what was changed, or ""."""
    environment, path, arguments = before
    now, said = dict(os.environ), []
    if now != environment:
        changed = sorted({name for name, _ in now.items() ^ environment.items()})
        os.environ.clear()
        os.environ.update(environment)
        said.append(f"changes the environment ({', '.join(changed)})")
    if sys.path != path:
        sys.path[:] = path
        said.append("changes sys.path")
    if sys.argv != arguments:
        sys.argv[:] = arguments
        said.append("changes sys.argv")
    return "; ".join(said)
