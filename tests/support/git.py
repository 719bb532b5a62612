"""Repositories that tests make, whatever git is configured to do on this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def run_git(folder: Path, *arguments: str) -> str:
    """Run a git command in a folder; returns what it prints."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "gc.auto=0"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(
        ["git", *identity, "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**clean, "GIT_CONFIG_GLOBAL": os.devnull},
    )
    return done.stdout


def commit_all(folder: Path, *options: str) -> None:
    """Make a repository of a folder, with all its files in one commit.

    Args:
        folder: the folder.
        options: of `git init`.
    """
    run_git(folder, "init", "-q", *options)
    run_git(folder, "add", ".")
    run_git(folder, "commit", "-qm", "upstream")
