"""Processor time, which others on the machine change less than the time of a clock."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

from tests.support import REPOSITORY

_LOOP = "x = 0\nfor i in range(5_000_000): x += i"
_USUAL = 0.35
"""Seconds of the loop on the machine for which bounds are given."""


def seconds(*command: str, **environment: str) -> float:
    """Processor time of a Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), **environment}
    subprocess.run([sys.executable, *command], env=given, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def slowness() -> float:
    """How many times the usual a processor takes now, which may be slow or shared."""
    return max(1.0, seconds("-c", _LOOP) / _USUAL)
