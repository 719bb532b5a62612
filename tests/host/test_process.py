"""Processes: identity, relations, and termination, on real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cppmega.host import env, process
from tests.support import PATIENCE

_PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
_SLEEPER = [sys.executable, "-c", "print('up', flush=True); input()", "a word"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs and waits for its standard input, in a session of its own."""
    place = {**os.environ, env.RUN.name: "/runs/one"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        _SLEEPER, stdin=pipe, stdout=pipe, env=place, start_new_session=True
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == b"up\n"
        yield running
        running.kill()


def test_a_process_is_identified_by_its_number_and_its_start(
    sleeper: subprocess.Popen[bytes],
) -> None:
    since = process.started(sleeper.pid)
    assert since.isdigit() and process.alive(sleeper.pid, since)
    assert not process.alive(sleeper.pid, str(int(since) - 1)), "an earlier one of that number"
    assert not process.alive(sleeper.pid, "")
    assert 0 <= process.age(sleeper.pid) < 600
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert process.started(sleeper.pid) == "", "only its exit status is left"
    assert not process.alive(sleeper.pid, since) and process.age(sleeper.pid) == 0


def test_what_is_known_of_a_process(sleeper: subprocess.Popen[bytes]) -> None:
    assert process.command(sleeper.pid) == _SLEEPER
    assert process.environment(sleeper.pid)[env.RUN.name] == "/runs/one"
    assert process.ancestors(sleeper.pid)[0] == os.getpid()
    assert sleeper.pid in process.children(os.getpid())
    assert process.session(sleeper.pid) == sleeper.pid
    assert process.of_session(sleeper.pid) == [sleeper.pid]
    assert process.forked_from(sleeper.pid) == sleeper.pid


def test_a_process_that_is_gone_answers_with_nothing(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait()
    gone = sleeper.pid
    assert process.command(gone) == process.children(gone) == process.ancestors(gone) == []
    assert process.environment(gone) == {} and process.session(gone) is None
    assert process.forked_from(gone) == gone
    assert not process.send(gone, signal.SIGTERM)


def test_helpers_of_one_run_are_ended_and_those_of_another_are_not(
    sleeper: subprocess.Popen[bytes],
) -> None:
    process.end_helpers("/runs/two", [sleeper.pid])
    assert process.started(sleeper.pid)
    process.end_helpers("/runs/one", [sleeper.pid])
    assert sleeper.wait(PATIENCE) == -signal.SIGKILL


def test_children_of_children_are_found() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE) as parent:
        try:
            while len(below := process.children(parent.pid, recursive=True)) < 1:
                assert parent.poll() is None
            assert below == process.children(parent.pid)
            assert set(below) < set(process.children(os.getpid(), recursive=True))
        finally:
            parent.stdin.close() if parent.stdin else None
            parent.wait(PATIENCE)
