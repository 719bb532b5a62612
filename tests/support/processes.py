"""Processes that import this repository, and what else the calling process finds."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support import PATIENCE, REPOSITORY


def python_path(*first: Path) -> str:
    """PYTHONPATH with these folders, this repository, and the caller's own."""
    folders = (*map(str, first), str(REPOSITORY), os.environ.get("PYTHONPATH"))
    return os.pathsep.join(filter(None, folders))


def started(*command: str, **variables: str) -> subprocess.Popen[str]:
    """Start a command with one thread; its errors go to its output."""
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def assert_all_pass(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for the processes, and show what all of them said if one has failed."""
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
