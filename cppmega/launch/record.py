"""Record the machine and the sources, so that it is known later what ran."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path

from cppmega import __version__
from cppmega.host import packages as stack
from cppmega.host.paths import PACKAGE
from cppmega.runs.manifest import GitState, SourceFile, ToolRecord

_MORE_PACKAGES = ("numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "cuda")


def versions() -> dict[str, str]:
    """Versions of Python, the driver and the training packages; imports none of them."""
    known = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "driver": _driver(),
    }
    for name in (*stack.NAMES, *_MORE_PACKAGES):
        version = stack.version(name)
        if version is not None:
            known[name] = version
    return {name: version for name, version in known.items() if version}


def _driver() -> str:
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first.split() if word[:1].isdigit() and "." in word), first)


def source_file(path: Path) -> SourceFile:
    """A source file: its hash, and its state in its git repository."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return SourceFile(path=str(path.resolve()), sha256=digest, git=git_state(path))


def tool() -> ToolRecord:
    """This package: its version, and its commit if it is a checkout."""
    return ToolRecord(version=__version__, git=git_state(PACKAGE))


def git_state(path: Path) -> GitState | None:
    """The commit of the repository around a path, and whether the path differs from it.

    Returns:
        None if there is no repository, or if it does not track the path.
    """
    folder = path if path.is_dir() else path.parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or _git(folder, "ls-files", "--", str(path.resolve())) in (None, ""):
        return None
    changed = _git(folder, "status", "--porcelain", "--", str(path.resolve()))
    return GitState(commit=commit, changed=bool(changed))


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            # The repository may be another user's: run nothing that its configuration names, fetch
            # nothing, write nothing.
            ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words],
            env={**os.environ, "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
