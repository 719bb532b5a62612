"""The operations of tmux that a launch needs.

tmux expands formats, `#(shell command)` among them, in names of sessions and in the folder of `-c`,
and passes a single word to a shell. A tmux server keeps the environment that it was started with,
perhaps days ago in another virtual environment, and gives it to new sessions. So names are letters,
digits, `-` and `_`, and a session reads folder, environment and command from a private file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from cppmega.errors import CppmegaError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_NO_SERVER = ("no server running", "No such file or directory", "Connection refused")
_NO_SESSION = (
    *("can't find session", "session not found", "server exited"),
    "no current target",  # the server is ending after its last session
)


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


_BECOME = """
import json, os, sys
with open(sys.argv[1]) as file:
    order = json.load(file)
os.unlink(sys.argv[1])
kept = {name: os.environ[name] for name in order["kept"] if name in os.environ}
os.chdir(order["folder"])
os.execve(order["command"][0], order["command"], {**order["environment"], **kept})
"""
"""The first program of a session: it becomes the command of its launch."""
_OF_TMUX = ("TMUX", "TMUX_PANE", "TERM", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "COLORTERM")


def start(name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run a command in a new detached session, with exactly that environment.

    If two launches ask for one name at the same time, tmux decides which one gets it.

    Raises:
        CppmegaError: `session-exists`, `session-not-started`.
    """
    order = {
        "command": [*command],
        "folder": str(folder),
        "environment": {**environment},
        "kept": _OF_TMUX,
    }
    try:
        descriptor, file = tempfile.mkstemp(prefix="cppmega-")  # which only this user can read
        with os.fdopen(descriptor, "w") as opened:
            json.dump(order, opened)
    except OSError as error:
        raise _not_started(name, f"{error.strerror}") from None
    words = [sys.executable, "-I", "-c", _BECOME, file]
    created = _tmux("new-session", "-d", "-s", name, *words)
    if created.returncode:
        Path(file).unlink(missing_ok=True)
        duplicate = "duplicate session" in created.stderr
        raise _exists_already(name) if duplicate else _not_started(name, created.stderr.strip())


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
