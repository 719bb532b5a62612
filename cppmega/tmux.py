"""The terminal multiplexer, as far as a launch needs it.

A tmux server keeps the environment that it was started with, perhaps days ago in another virtual
environment, and gives that to new sessions. So ours travels in a private file that the session
reads, removes, and then becomes the command with exactly that environment.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from cppmega.errors import CppmegaError

_FROM_TMUX = ("TMUX", "TMUX_PANE", "TERM", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "COLORTERM")
_BOOTSTRAP = (
    "import json,os,sys;p=sys.argv[1];f=open(p);e=json.load(f);f.close();os.unlink(p);"
    "os.rmdir(os.path.dirname(p));"
    f"e.update((k,os.environ[k]) for k in {_FROM_TMUX!r} if k in os.environ);"
    "os.execve(sys.argv[2],sys.argv[2:],e)"
)


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
    """tmux would change other names without a word, and nobody would find the session again.

    Raises:
        CppmegaError: `bad-session-name`.
    """
    if not name or any(sign in name for sign in ".: \t\n=$@%*?[]") or name.startswith("-"):
        raise CppmegaError(
            "bad-session-name",
            f"{name!r} is no name for a tmux session.",
            "tmux replaces or interprets some signs: the session would have another name.",
            "use letters, digits, - and _",
        )


def exists(name: str) -> bool:
    """Whether there is a session of that name."""
    if shutil.which("tmux") is None:
        return False
    return _tmux("has-session", "-t", f"={name}").returncode == 0


def refuse_existing(name: str) -> None:
    """No two runs in one session.

    Raises:
        CppmegaError: `session-exists`.
    """
    if exists(name):
        raise CppmegaError(
            "session-exists",
            f"There is a tmux session {name} already.",
            "Another run may be in it.",
            f"tmux attach -t {name} shows what is in it; or another --tmux NAME",
        )


def start(name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """A detached session that runs a command, with that environment and no other.

    Raises:
        CppmegaError: `session-not-started`.
    """
    private = Path(tempfile.mkdtemp(prefix="cppmega-session-")) / "environment.json"
    private.touch(mode=0o600)
    private.write_text(json.dumps(dict(environment)))
    line = shlex.join([sys.executable, "-I", "-c", _BOOTSTRAP, str(private), *command])
    made = _tmux("new-session", "-d", "-s", name, "-c", str(folder), f"exec {line}")
    if made.returncode:
        shutil.rmtree(private.parent)
        raise CppmegaError(
            "session-not-started",
            f"tmux did not start the session {name}: {made.stderr.strip()}",
            "Nothing was started.",
            "launch without --tmux to run in this terminal",
        )


def attach(name: str) -> None:
    """Become a client of the session; does not return."""
    inside = bool(os.environ.get("TMUX"))
    words = ["switch-client" if inside else "attach-session", "-t", f"={name}"]
    os.execvp("tmux", ["tmux", *words])


def _tmux(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["tmux", *words], capture_output=True, text=True, check=False)
