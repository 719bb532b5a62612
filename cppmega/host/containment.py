"""Run code of pages and recipes in this process; any failure becomes a named error.

Pages are loaded, edit nodes and answer questions inside the command that uses them. They must not
end the process, run forever, start another program, write a file, or change what the engine relies
on. This module catches accidents and simple attempts to do so on purpose. It is not a sandbox: code
in the same process that is determined to evade it can.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import posix
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from cppmega.errors import CppmegaError
from cppmega.host.footprint import OF_FILES, Footprint

LIMIT = 30.0
"""Seconds that a page has for one answer, which should take milliseconds."""
GRACE = 3.0
"""Seconds after the limit until the process is ended if the code catches the interruption."""

Failed = Callable[[str], CppmegaError]
"""Builds the caller's error from a predicate such as `starts a process (os.system)`."""

_STARTS = {
    **dict.fromkeys(("os.kill", "os.killpg", "signal.pthread_kill"), "sends a signal"),
    **dict.fromkeys(("os.exec", "os.fork", "os.forkpty", "os.posix_spawn"), "starts a process"),
    **dict.fromkeys(("os.system", "subprocess.Popen", "pty.spawn"), "starts a process"),
    **dict.fromkeys(("socket.connect", "socket.bind", "socket.sendto"), "uses the network"),
    **dict.fromkeys(("os.chdir", "os.fchdir", "resource.setrlimit"), "changes the process"),
    **dict.fromkeys(("sys.addaudithook", "os.setxattr"), "changes the process"),
}
_WRITES = {
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"),
    *("os.chmod", "os.chown", "os.utime", "shutil.rmtree", "shutil.copyfile", "shutil.move"),
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Forbidden(BaseException):
    """Raised when page code does something forbidden; `except Exception` does not catch it."""


def _other_threads() -> frozenset[int | None]:
    here = threading.get_ident()
    return frozenset(thread.ident for thread in threading.enumerate() if thread.ident != here)


@dataclass
class _Watch:
    """The state of the supervision while code of a page runs."""

    failed: Failed
    seconds: float
    others: frozenset[int | None] = field(default_factory=_other_threads)
    """Threads that existed before, which are not supervised."""
    stdout: Any = field(default_factory=lambda: sys.stdout)
    threads: bool = False
    """Whether the code has started a thread."""
    done: str = ""
    """The first forbidden action; kept because the code may catch `_Forbidden`."""

    def refuse(self, what: str) -> NoReturn:
        self.done = self.done or what
        raise _Forbidden(what)


_watch: _Watch | None = None
_hooked = False
_compares = True
"""Whether each supervised piece of code is followed by a comparison of the process's state."""


@contextmanager
def contained(failed: Failed, seconds: float | None = None) -> Iterator[None]:
    """Supervise code of a page or a recipe.

    A `CppmegaError` and Ctrl-C pass through; every other failure becomes the caller's error.

    Raises:
        CppmegaError: built by `failed` from a description of what the code did.
    """
    global _watch
    if _watch is not None:  # a recipe that a page loads is supervised with the page
        with converted(failed):
            yield
        return
    _hook()
    footprint = Footprint.now() if _compares else None
    watch = _watch = _Watch(failed, LIMIT if seconds is None else seconds)
    raised: CppmegaError | None = None
    try:
        to_stderr = contextlib.redirect_stdout(sys.stderr)
        with _stand_ins(watch), _time_limit(watch), to_stderr, converted(failed):
            yield
    except CppmegaError as error:
        raised = error
    except _Forbidden as error:  # perhaps from a stand-in that it kept from an earlier call
        watch.done = watch.done or str(error)
    finally:
        _watch = None
        left = footprint.restore() if footprint is not None else ""
    if watch.done or left:
        raise failed(watch.done or left) from raised
    if raised is not None:
        raise raised


@contextmanager
def compared_once() -> Iterator[list[str]]:
    """Compare the state of this process once for several supervised pieces of code.

    A comparison takes as long as most pages take to run. The list receives what one of them has
    changed, without saying which.
    """
    global _compares
    _hook()
    changes: list[str] = []
    footprint, _compares = Footprint.now(), False
    try:
        yield changes
    finally:
        _compares = True
        changes += filter(None, [footprint.restore()])


def _await_threads(watch: _Watch) -> None:
    """Wait for the threads that the code started; none may outlive the supervision."""
    mine = threading.get_ident()
    for thread in threading.enumerate() if watch.threads else ():
        if thread.ident not in watch.others and thread.ident != mine:
            thread.join(GRACE)
            if thread.is_alive():
                _end(watch, watch.failed(f"leaves the thread {thread.name} running"))


@contextmanager
def converted(failed: Failed) -> Iterator[None]:
    """Turn any exception into the caller's error, without supervision."""
    try:
        yield
    except (CppmegaError, _Forbidden, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise failed(f"raises {type(error).__name__}: {error}") from error


def _hook() -> None:
    """Install the audit hook, which cannot be removed and is idle outside of supervision."""
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_audit)
        if signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL:
            faulthandler.register(signal.SIGVTALRM, file=2, chain=True)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    watch = _watch
    if watch is None or threading.get_ident() in watch.others:
        return
    if event == "_thread.start_new_thread":
        watch.threads = True
    if event in _STARTS:
        watch.refuse(f"{_STARTS[event]} ({event})")
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & _WRITING and not _harmless(path):
            watch.refuse(f"writes the file {path}")
    elif event in _WRITES and not _harmless(arguments[0]):
        watch.refuse(f"changes the file {arguments[0]} ({event})")
    elif event == "ctypes.dlsym" and str(arguments[1]).lstrip("_").lower() in _OF_THE_LIBRARY:
        watch.refuse(f"ends the process ({arguments[1]})")


_OF_THE_LIBRARY = {
    *("exit", "quick_exit", "abort", "kill", "raise", "syscall", "execv", "execve"),
    *("py_exit", "py_finalize", "py_finalizeex", "py_endinterpreter", "py_fatalerror"),
}


def _harmless(path: object) -> bool:
    """Whether a path is Python's bytecode, a file that is already open, or the null device."""
    if isinstance(path, int) or path == os.devnull or "__pycache__" in str(path):
        return True
    return sys.pycache_prefix is not None and str(path).startswith(sys.pycache_prefix)


@contextmanager
def _stand_ins(watch: _Watch) -> Iterator[None]:
    """Replace functions for which Python raises no audit event with functions that refuse."""
    originals = [(module, name, getattr(module, name)) for module, name, _ in _UNANNOUNCED]
    for module, name, what in _UNANNOUNCED:
        setattr(module, name, partial(_refused, watch, f"{what} ({module.__name__}.{name})"))
    atexit.register = partial(_registered, watch)  # type: ignore[assignment]
    try:
        yield
    finally:
        _await_threads(watch)
        atexit.register = _register
        for module, name, original in originals:
            setattr(module, name, original)


def _refused(watch: _Watch, what: str, *_: object, **__: object) -> NoReturn:
    watch.refuse(what)


def _registered(watch: _Watch, function: Any, *arguments: Any, **named: Any) -> Any:
    """Call `atexit.register` for the libraries that a page imports, but not for the page itself."""
    if str(getattr(function, "__module__", "")).startswith(OF_FILES):
        watch.refuse("registers a function to run when the process ends (atexit.register)")
    return _register(function, *arguments, **named)


_UNANNOUNCED: list[tuple[Any, str, str]] = [
    *((module, "_exit", "ends the process") for module in (os, posix)),
    *((module, "abort", "ends the process") for module in (os, posix)),
    (signal, "raise_signal", "sends a signal"),
    *(
        (signal, name, "changes how signals are handled")
        for name in ("signal", "pthread_sigmask", "alarm", "setitimer", "siginterrupt")
    ),
]
_register = atexit.register
_setitimer, _signal = signal.setitimer, signal.signal
_exit = os._exit


@contextmanager
def _time_limit(watch: _Watch) -> Iterator[None]:
    """Interrupt code that does not end; end the process if it catches the interruption.

    The second timer counts processor time and works without the interpreter. It also ends C code
    that never checks for signals, and prints a traceback instead of a message.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.monotonic()

    def interrupted(number: int, frame: FrameType | None) -> None:
        what = f"has not finished after {watch.seconds:g} seconds"
        if time.monotonic() - began > watch.seconds + GRACE:
            _end(watch, watch.failed(what))
        watch.refuse(what)

    # No timer runs while the handler changes: the machine may take any time for the next line.
    rest, interval = _setitimer(signal.ITIMER_REAL, 0)
    before = _signal(signal.SIGALRM, interrupted)
    _setitimer(signal.ITIMER_REAL, watch.seconds, 0.5)
    busy = _setitimer(signal.ITIMER_VIRTUAL, watch.seconds + 2 * GRACE)
    try:
        yield
    finally:
        _setitimer(signal.ITIMER_VIRTUAL, *busy)
        _setitimer(signal.ITIMER_REAL, 0)
        _signal(signal.SIGALRM, before)
        left = max(rest - (time.monotonic() - began), 0.01) if rest else 0
        _setitimer(signal.ITIMER_REAL, left, interval)


def _end(watch: _Watch, error: CppmegaError) -> NoReturn:
    """Report the error and end the process, since the code does not return control."""
    with contextlib.suppress(BaseException), contextlib.redirect_stdout(watch.stdout):
        last_words(error)
        watch.stdout.flush()
    _exit(1)


def _render(error: CppmegaError) -> None:
    os.write(2, (error.render() + "\n").encode())


last_words: Callable[[CppmegaError], None] = _render
"""Reports why the process ends; the console replaces it with one that supports `--json`."""
