"""How the tests run processes, where a mistake would stop all of them instead of failing one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests import support
from tests.support import weekly

_STARTS_A_SLEEPER = """
import subprocess, sys
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(sleeper.pid, file=sys.stderr, flush=True)
"""


def test_output_that_a_process_left_behind_holds_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "AFTER_A_KILL", 0.1)
    one = subprocess.Popen(
        [sys.executable, "-c", _STARTS_A_SLEEPER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        one.wait()
        with pytest.raises(AssertionError, match=r"rank 0: \d+\n+A process that it started still"):
            support.outputs([one], timeout=0.1)
    finally:
        os.killpg(one.pid, signal.SIGKILL)


def test_versions_in_between_are_left_for_the_week(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that has no other version keeps its last one."""
    monkeypatch.setattr(weekly, "NOW", False)
    assert weekly.of_this_run(("0.16.1", "0.17.1", "0.18.2", "0.19.2")) == ("0.16.1", "0.19.2")
    assert weekly.of_this_run(("0.17.1", "0.18.2")) == ("0.18.2",)
    monkeypatch.setattr(weekly, "NOW", True)
    assert weekly.of_this_run(("0.17.1", "0.18.2")) == ("0.17.1", "0.18.2")
