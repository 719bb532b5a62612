"""Processes that import this repository, and what else the calling process finds."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from tests.support import PATIENCE, REPOSITORY


def started(*command: str, **variables: str) -> subprocess.Popen[str]:
    """Start a command with one thread; its errors go to its output."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def assert_all_pass(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for the processes, and show what all of them said if one has failed."""
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
