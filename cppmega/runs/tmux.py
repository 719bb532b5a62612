"""The terminal multiplexer, as far as a launch needs it.

tmux expands formats, `#(shell command)` among them, in names of sessions and in the folder of `-c`,
and passes a single word to a shell. So names are letters, digits, `-` and `_`, nothing else that a
user chose reaches tmux's command line, and the session learns over a socket what it is to run
(`cppmega.runs.tmux_session`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.runs import tmux_session

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_NO_SERVER = ("no server running", "No such file or directory", "Connection refused")
_NO_SESSION = ("can't find session", "session not found", "server exited")
_ANSWERS = 30.0
"""Seconds that a new session gets to ask for its command."""


def require(without: str) -> str:
    """The program.

    Args:
        without: the command that does the same without it.

    Raises:
        CppmegaError: `no-tmux`.
    """
    found = shutil.which("tmux")
    if found is None:
        raise CppmegaError(
            "no-tmux",
            "tmux is not installed on this machine.",
            "A run in a session goes on when the connection is lost; without it, it needs this "
            "terminal.",
            f"apt-get install tmux; or without it, in this terminal: {without}",
        )
    return found


def check_name(name: str) -> None:
    """tmux would change other names without a word, or run what they hold as a command.

    Raises:
        CppmegaError: `bad-session-name`.
    """
    if not _NAME.fullmatch(name):
        raise CppmegaError(
            "bad-session-name",
            f"{name!r} is not a name for a tmux session.",
            "tmux replaces or interprets other characters: the session would have another name, "
            "and #(...) would run as a shell command.",
            "use letters, digits, - and _",
        )


def exists(name: str) -> bool:
    """Whether there is a session of that name.

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
            "Whether the session exists is not known.",
            "tmux ls, and see TMUX_TMPDIR; or launch without --tmux to run in this terminal",
        )
    return done.returncode == 0


def refuse_existing(name: str) -> None:
    """No two runs in one session.

    Raises:
        CppmegaError: `session-exists`, `tmux-broken`.
    """
    if exists(name):
        raise _taken(name)


def _taken(name: str) -> CppmegaError:
    return CppmegaError(
        "session-exists",
        f"There is a tmux session {name} already.",
        "Another run may be in it.",
        f"tmux attach -t {name} shows what is in it; or another --tmux NAME",
    )


@contextlib.contextmanager
def reserve(name: str) -> Iterator[Reserved]:
    """A detached session that waits for its command, and ends where it gets none.

    It exists before anything of the run is written: of two launches that ask for one name at the
    same time, tmux itself lets one have it.

    Raises:
        CppmegaError: `session-exists`, `session-not-started`.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        address = f"cppmega-{secrets.token_hex(16)}"
        listener.bind("\0" + address)  # no file: nothing is left behind, whatever ends when
        listener.listen()
        words = [sys.executable, "-I", tmux_session.__file__, address]
        made = _tmux("new-session", "-d", "-s", name, *words)
        if made.returncode:
            duplicate = "duplicate session" in made.stderr
            raise _taken(name) if duplicate else _not_started(name, made.stderr.strip())
        session = Reserved(name, listener)
        try:
            yield session
        finally:
            if not session.started:
                _tmux("kill-session", "-t", f"={name}")


class Reserved:
    """A session that has no command yet."""

    def __init__(self, name: str, listener: socket.socket) -> None:
        self.name, self.listener = name, listener
        self.started = False

    def run(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        """Have it become a command, with that environment and no other.

        Raises:
            CppmegaError: `session-not-started`.
        """
        order = {"command": [*command], "folder": str(folder), "environment": {**environment}}
        try:
            with self._asking() as link:
                link.sendall(json.dumps(order).encode())
        except OSError as error:
            raise _not_started(self.name, f"{error.strerror}") from None
        self.started = True

    def _asking(self) -> socket.socket:
        """The session's own connection."""
        deadline = time.monotonic() + _ANSWERS
        self.listener.settimeout(0.2)
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                link, _ = self.listener.accept()
                if tmux_session.same_user(link):
                    link.settimeout(_ANSWERS)
                    return link
                link.close()
            if not exists(self.name):
                raise _not_started(self.name, "it ended at once")
        raise _not_started(self.name, f"it did not ask for its command within {_ANSWERS:.0f} s")


def _not_started(name: str, reason: str) -> CppmegaError:
    return CppmegaError(
        "session-not-started",
        f"tmux did not start the session {name}: {reason}.",
        "Nothing is running.",
        "launch without --tmux to run in this terminal",
    )


def attach(name: str) -> None:
    """Become a client of the session; does not return."""
    inside = bool(os.environ.get("TMUX"))
    words = ["switch-client" if inside else "attach-session", "-t", f"={name}"]
    os.execvp("tmux", ["tmux", *words])


def _tmux(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["tmux", *words], capture_output=True, text=True, check=False)
