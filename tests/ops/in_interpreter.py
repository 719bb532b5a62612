"""Run code in a new process, since Triton decides at its import whether it interprets kernels."""

from __future__ import annotations

import os
import subprocess
import sys


def run(code: str, warnings: str = "default") -> str:
    """Run code in a single-threaded process; return what it prints, or raise an AssertionError.

    Args:
        code: the text of a module.
        warnings: the value of Python's option `-W`.
    """
    done = subprocess.run(
        [sys.executable, "-W", warnings, "-c", f"import tests.ops.interpreted\n{code}"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
