"""The operations of tmux that a launch needs.

tmux expands formats, `#(shell command)` among them, in names of sessions and in the folder of `-c`,
and passes a single word to a shell. So names are letters, digits, `-` and `_`, and the session
reads its command from a private file whose folder it is told by a variable, which tmux does not
expand (`cppmega.runs.tmux_session`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.runs import tmux_session

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_NO_SERVER = ("no server running", "No such file or directory", "Connection refused")
_NO_SESSION = (
    *("can't find session", "session not found", "server exited"),
    "no current target",  # the server is ending after its last session
)
_ANSWERS = 120.0
"""Seconds within which a new session must take its command."""


def require(without: str) -> str:
    """Find the program.

    Args:
        without: the command that does the same without it.

    Raises:
        CppmegaError: `no-tmux`.
    """
    program = shutil.which("tmux")
    if program is None:
        raise CppmegaError(
            "no-tmux",
            "tmux is not installed on this machine.",
            "A run in a session continues when the connection is lost; without one it needs this "
            "terminal.",
            f"apt-get install tmux; or without it, in this terminal: {without}",
        )
    return program


def check_name(name: str) -> None:
    """Check a session name: tmux silently changes others, or runs what they hold as a command.

    Raises:
        CppmegaError: `bad-name`.
    """
    if not _NAME.fullmatch(name):
        raise CppmegaError(
            "bad-name",
            f"{name!r} is not a valid name for a tmux session.",
            "tmux replaces or interprets other characters: the session would have another name, "
            "and #(...) would run as a shell command.",
            "use letters, digits, - and _",
        )


def exists(name: str) -> bool:
    """Whether a session of that name exists.

    Raises:
        CppmegaError: `tmux-broken`.
    """
    if shutil.which("tmux") is None:
        return False
    done = _tmux("has-session", "-t", f"={name}")
    if done.returncode and not any(text in done.stderr for text in (*_NO_SERVER, *_NO_SESSION)):
        raise CppmegaError(
            "tmux-broken",
            f"tmux does not answer: {done.stderr.strip() or 'it printed no reason'}",
            "It is not known whether the session exists.",
            "tmux ls, and see TMUX_TMPDIR; or launch without --tmux to run in this terminal",
        )
    return done.returncode == 0


def refuse_existing(name: str) -> None:
    """Refuse the name of an existing session: two runs must not share one.

    Raises:
        CppmegaError: `session-exists`, `tmux-broken`.
    """
    if exists(name):
        raise _exists_already(name)


def _exists_already(name: str) -> CppmegaError:
    return CppmegaError(
        "session-exists",
        f"The tmux session {name} already exists.",
        "Another run may be in it.",
        f"tmux attach -t {name} shows it; or another --tmux NAME",
    )


@contextlib.contextmanager
def reserve(name: str) -> Iterator[Reserved]:
    """Create a detached session that waits for its command, and ends if it receives none.

    It exists before anything of the run is written: if two launches ask for one name at the same
    time, tmux itself decides which one gets it.

    Raises:
        CppmegaError: `session-exists`, `session-not-started`.
    """
    with tempfile.TemporaryDirectory(prefix="cppmega-", ignore_cleanup_errors=True) as place:
        words = [sys.executable, "-I", tmux_session.__file__, str(os.getpid())]
        variable = f"{tmux_session.PLACE}={place}"
        created = _tmux("new-session", "-d", "-s", name, "-e", variable, *words)
        if created.returncode:
            duplicate = "duplicate session" in created.stderr
            raise _exists_already(name) if duplicate else _not_started(name, created.stderr.strip())
        session = Reserved(name, Path(place))
        try:
            yield session
        finally:
            if not session.started:
                _tmux("kill-session", "-t", f"={name}")


class Reserved:
    """A session without a command."""

    def __init__(self, name: str, place: Path) -> None:
        self.name, self.place = name, place
        self.started = False

    def run(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        """Let it become a command, with exactly that environment.

        Raises:
            CppmegaError: `session-not-started`.
        """
        order = {"command": [*command], "folder": str(folder), "environment": {**environment}}
        file, deadline = self.place / tmux_session.ORDER, time.monotonic() + _ANSWERS
        try:
            new = file.with_suffix(".new")
            new.touch(0o600)
            new.write_text(json.dumps(order))
            new.replace(file)
        except OSError as error:
            raise _not_started(self.name, f"{error.strerror}") from None
        while file.exists():
            if not exists(self.name):
                raise _not_started(self.name, "it ended immediately")
            if time.monotonic() > deadline:
                reason = f"it did not take its command within {_ANSWERS:.0f} s"
                raise _not_started(self.name, reason)
            time.sleep(0.05)
        self.started = True


def _not_started(name: str, reason: str) -> CppmegaError:
    return CppmegaError(
        "session-not-started",
        f"tmux did not start the session {name}: {reason}.",
        "Nothing is running.",
        "launch without --tmux to run in this terminal",
    )


def attach(name: str) -> None:
    """Become a client of the session. Does not return."""
    inside = bool(os.environ.get("TMUX"))
    words = ["switch-client" if inside else "attach-session", "-t", f"={name}"]
    os.execvp("tmux", ["tmux", *words])


def _tmux(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["tmux", *words], capture_output=True, text=True, check=False)
