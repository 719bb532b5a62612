"""Answers on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, Literal, Self, TextIO

import click

from cppmega.errors import CppmegaError


def hold_standard_streams() -> None:
    """Open /dev/null in place of a standard stream that is closed (`>&-`).

    The next file to be opened would otherwise get its number, and receive what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path need not be text


UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Errors of a stream or a disk that takes no more; they name no file."""
_LONGEST = 500
"""Characters of a path that an error shows."""


@contextlib.contextmanager
def whole_answer() -> Iterator[None]:
    """Run a command; end in one error if stdout or a disk does not take all that it writes.

    A reader that stops early (`| head`) does not count, and does not change the exit status.
    """
    try:
        yield
    except (SystemExit, OSError) as ending:
        if type(sys.stdout).__name__.endswith("PacifyFlushWrapper"):
            sys.exit(0)  # click has seen that the reader stopped early
        lost = _end_of_answer() or (ending if isinstance(ending, OSError) else None)
        if lost is None:
            raise
        say(of_system(lost).render())
        sys.exit(2)


def _end_of_answer() -> OSError | None:
    """Flush stdout; returns the error if it does not take the answer, and silences it."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _mute(sys.stdout)
        return None if isinstance(error, BrokenPipeError) else error
    return None


def of_system(error: OSError) -> CppmegaError:
    """Return the error of a file that this machine does not give, or of a disk that is full."""
    if not error.filename:
        return CppmegaError(
            "cannot-write",
            f"An answer or a file could not be written: {error.strerror}.",
            "Whoever reads it would take a part of it for all.",
            "free space on the disk, and run the command again",
        )
    name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
    shown = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}... ({len(name)} characters)"
    return CppmegaError(
        "file-unusable",
        f"{error.strerror}: {shown}",
        "The command needs this file or folder.",
        "correct the path or its permissions, and run the command again",
    )


def say(message: str) -> None:
    """Print a line of progress; if its reader is gone, the command continues."""
    _put(f"{_ERASED if Progress.shown else ''}{message}\n")


def _put(text: str) -> None:
    """Write to stderr; if its reader is gone, redirect it so that Python does not fail at exit."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        _mute(sys.stderr)


def _mute(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def numbered(number: int, total: int) -> Callable[[str], None]:
    """Return a `say` whose lines begin with the place of a task among all."""
    return lambda message: say(f"{position(number, total)} {message}")


class Progress:
    """The number and the name of the task that runs, in one line of a terminal on stderr.

    Nothing is printed elsewhere: a log would keep what is of use for a moment. Of two that are
    nested, the outer one is shown.
    """

    shown: ClassVar[Progress | None] = None

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total = title, total
        self.begun = 0

    def __call__(self, name: str) -> None:
        """Show the name of the task that starts now."""
        self.begun += 1
        if Progress.shown is self:
            line = f"{self.title}: {position(self.begun, self.total)} {name}"
            _put(f"{_ERASED}{line[: (terminal_width(sys.stderr) or _USUAL_WIDTH) - 1]}")

    def __enter__(self) -> Self:
        if Progress.shown is None and sys.stderr.isatty():
            Progress.shown = self
        return self

    def __exit__(self, *error: object) -> None:
        if Progress.shown is self:
            Progress.shown = None
            if self.begun:
                _put(_ERASED)


_ERASED = "\r\033[K"


def position(number: int, total: int) -> str:
    """The place of a task among all, such as `[12/53]`."""
    return f"[{number:>{len(str(total))}}/{total}]"


def each(title: str, names: Collection[str]) -> Iterator[str]:
    """Yield the names; each is shown as a `Progress` while the caller works on it."""
    with Progress(title, len(names)) as progress:
        for name in names:
            progress(name)
            yield name


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Print an answer; a reader that stops early (`| head`) does not change the exit status."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _mute(sys.stdout)


def terminal_width(stream: TextIO | None = None) -> int | None:
    """The width of the terminal on a stream, stdout by default; None if it has none, as a log."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return None
    try:
        known = os.environ.get("COLUMNS") or os.get_terminal_size(stream.fileno()).columns
        return int(known) or _USUAL_WIDTH
    except (OSError, ValueError):
        return _USUAL_WIDTH


_USUAL_WIDTH = 80


Style = Literal["good", "bad", "alarm", "waiting", "note"]

STYLES: Mapping[Style, Mapping[str, Any]] = {
    "good": {"fg": "green"},
    "bad": {"fg": "red"},
    "alarm": {"fg": "red", "bold": True},
    "waiting": {"fg": "yellow"},
    "note": {"fg": "cyan"},
}
"""The arguments of `click.style` for each style."""


def styled(text: str, style: Style | None) -> str:
    """Style a text for stdout; unchanged if that is not a terminal or NO_COLOR is set."""
    if style is None or os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        return text
    return click.style(text, **STYLES[style])


ENVELOPE: Mapping[str, Any] = {
    "schema": 1,
    "megatron": None,
    "digest": "",
    "ok": False,
    "changed": [],
    "notes": [],
    "patches": [],
}
"""The keys that every `--json` answer has."""


def error_json(error: CppmegaError) -> dict[str, Any]:
    """The object that `--json` prints for an error."""
    return {**ENVELOPE, "error": error.as_json()}


def print_json(answer: Mapping[str, Any]) -> None:
    """Print one object on stdout."""
    print(json.dumps(answer, indent=2))
