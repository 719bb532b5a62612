"""Run code in a new process, since Triton decides at its import whether it interprets kernels."""

from __future__ import annotations

import os
import subprocess

from tests import forkserver


def run(code: str, warnings: str = "default") -> str:
    """Run code in a single-threaded process; return what it prints, or raise an AssertionError.

    Args:
        code: the text of a module.
        warnings: what becomes of them, and of which (of all), as in Python's option `-W`.
    """
    action, _, category = warnings.partition("::")
    start = f"import warnings\nwarnings.simplefilter({action!r}, {category or 'Warning'})"
    # Torch's remark on one version of Python is not about the code.
    start += "\nwarnings.filterwarnings('ignore', 'Guards may run slower on Python 3.13.0')"
    done = subprocess.run(
        [
            forkserver.executable(interprets=True),
            "-c",
            f"{start}\nimport tests.ops.interpreted\n{code}",
        ],
        env={**os.environ, forkserver.INTERPRETS: "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
