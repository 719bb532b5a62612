"""Many writers: one has the lock, and what others write is neither lost nor believed."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.overlay import transaction
from tests.overlay.two_pages import consistent, two_pages
from tests.support import outputs
from tests.support.lab import FILES, A, B, Lab
from tests.support.made import leftovers

pytestmark = pytest.mark.slow


def _together(lab: Lab, *verbs: str) -> list[tuple[int, str, str]]:
    processes = [
        subprocess.Popen(
            lab.command(verb, "--megatron", str(lab.root)),
            env=lab.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for verb in verbs
    ]
    answers = outputs(processes)
    return [(p.returncode, *answer) for p, answer in zip(processes, answers, strict=True)]


def test_eight_processes_apply_at_once(lab: Lab) -> None:
    """Every rank starts with an apply: one writes, the others find it done."""
    lab.wheel()
    two_pages(lab)
    answers = _together(lab, *["apply"] * 8)
    assert [code for code, _, _ in answers] == [0] * 8, answers
    assert sum("changed 2 files" in err for _, _, err in answers) == 1
    lab.applied("one", "two")
    assert not leftovers(lab.root)


def test_processes_that_apply_and_revert_at_once(lab: Lab) -> None:
    """The folder with the lock comes and goes: two must never believe to hold it."""
    lab.wheel()
    two_pages(lab)
    answers = _together(lab, *["apply", "revert"] * 4)
    assert not [err for code, _, err in answers if code not in (0, 1) or "Traceback" in err]
    consistent(lab)
    assert not leftovers(lab.root)
    assert lab.apply().ok
    lab.applied("one", "two")
    lab.revert()
    lab.pristine()


def test_lock_of_a_killed_process_is_free(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    code = "from cppmega.overlay import transaction as t; import os, signal\n"
    prelude = code + "t.fault_point = lambda name: os.kill(os.getpid(), signal.SIGKILL)"
    assert lab.run("apply", prelude=prelude).returncode == -signal.SIGKILL
    assert (lab.root / ".cppmega" / "lock").exists()
    assert lab.apply().ok
    assert not any("waiting" in line for line in lab.said)


def test_lock_that_is_never_released(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process hangs: we say so, with a name, and write nothing."""
    lab.wheel()
    lab.page()
    (lab.root / ".cppmega").mkdir()
    passed = itertools.count()  # seconds, however long the machine takes
    clock = SimpleNamespace(monotonic=lambda: float(next(passed)), sleep=lambda seconds: None)
    monkeypatch.setattr(transaction, "time", clock)
    with (lab.root / ".cppmega" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CppmegaError) as caught:
            lab.apply()
        assert caught.value.name == "locked-tree"
    assert any("waiting" in line for line in lab.said)
    assert lab.apply().ok


def test_lock_file_that_is_gone_locks_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last user removed the folder while we waited: whoever comes next locks a new file."""
    lab.wheel()
    place = lab.root / ".cppmega"
    real = fcntl.flock
    calls = 0

    def flock(handle: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            shutil.rmtree(place)
        real(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    handle = transaction._acquire(place, lab.said.append)
    assert calls == 2 and os.fstat(handle).st_ino == (place / "lock").stat().st_ino
    os.close(handle)


def test_work_that_another_process_did_meanwhile(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.wheel()
    lab.page()
    acquire = transaction._acquire

    def slow(*arguments: Any) -> int:
        monkeypatch.setattr(transaction, "_acquire", acquire)
        assert lab.apply().changed == [A]
        return acquire(*arguments)

    monkeypatch.setattr(transaction, "_acquire", slow)
    outcome = lab.apply()
    assert outcome.ok and not outcome.changed and not outcome.receipt_changed


def test_tree_is_looked_at_again_under_the_lock(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """While we waited somebody edited the file: the first look no longer counts."""
    lab.wheel()
    lab.page()
    acquire = transaction._acquire

    def slow(*arguments: Any) -> int:
        lab.change(A, b"x + x", b"x + 3")
        return acquire(*arguments)

    monkeypatch.setattr(transaction, "_acquire", slow)
    outcome = lab.apply()
    assert not outcome.ok and outcome.plan.verdicts["page"].state == "drifted"
    assert not (lab.root / ".cppmega").exists()


@pytest.mark.parametrize("path", [A, B])
def test_somebody_edits_while_we_patch(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """pip does not know our lock: its new file is neither overwritten nor rolled back."""
    lab.wheel()
    two_pages(lab)

    def meddle(name: str) -> None:
        if name == f"replace {path}":
            (lab.root / path).write_bytes(b"theirs = 1\n")

    with monkeypatch.context() as patch:
        patch.setattr(transaction, "fault_point", meddle)
        with pytest.raises(CppmegaError) as caught:
            lab.apply()
    assert caught.value.name == "changed-meanwhile" and path in caught.value.what
    assert (lab.root / path).read_bytes() == b"theirs = 1\n"
    other = B if path == A else A
    assert (lab.root / other).read_bytes() == FILES[other]
    assert not leftovers(lab.root)


def test_somebody_writes_what_we_just_wrote(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is read back: a torn write is found before the receipt says applied."""
    lab.wheel()
    two_pages(lab)

    def meddle(name: str) -> None:
        if name == f"read back {A}":
            (lab.root / A).write_bytes(b"torn")
            bytecode.parent.mkdir()
            bytecode.write_bytes(b"of the patched text")

    bytecode = (lab.root / A).parent / "__pycache__" / "a.cpython-311.pyc"

    monkeypatch.setattr(transaction, "fault_point", meddle)
    with pytest.raises(CppmegaError) as caught:
        lab.apply()
    assert caught.value.name == "torn-write"
    assert not bytecode.exists()
    lab.pristine()
