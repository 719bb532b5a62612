"""Code whose Triton kernels run on the CPU: Triton reads how when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys


def run(code: str, warnings: str = "default") -> str:
    """What code prints, in a process of one thread; an AssertionError if it fails.

    Args:
        code: of a module.
        warnings: what Python does about them, as `-W` takes it.
    """
    done = subprocess.run(
        [sys.executable, "-W", warnings, "-c", f"import tests.ops.interpreted\n{code}"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
