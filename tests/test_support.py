"""How the tests run processes, where a mistake would stop all of them instead of failing one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cppmega.host import process
from tests import support
from tests.support import in_a_tree, pristine

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
        with pytest.raises(AssertionError, match=r"rank 0: \d+\n+A process that it started still"):
            support.outputs([one], timeout=3)
    finally:
        os.killpg(one.pid, signal.SIGKILL)
        one.wait()


@pytest.mark.megatron
def test_what_a_forked_rank_starts_ends_with_it() -> None:
    """Megatron's process for results does not notice that the rank has ended."""
    answers = in_a_tree.asked(pristine("0.19.2"), "test_support", ["check_sleeper_of_a_rank"])
    assert not process.started(answers["check_sleeper_of_a_rank"])


def check_sleeper_of_a_rank(folder: Path) -> int:
    """The number of a process that a rank has started; runs in the process of a tree."""
    from tests.configurations.settings import Configuration
    from tests.upstream_patches.forked_ranks import on_ranks

    def sleeper(setting: Configuration) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid

    (pid,) = on_ranks(folder, Configuration(), sleeper)
    return int(pid)
