"""Kills at any step of a run: the next run finishes or rolls back."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from cppmega.overlay import transaction
from tests.overlay.two_pages import consistent, two_pages
from tests.support.lab import FILES, REPOSITORY, A, B, Lab
from tests.support.made import leftovers, snapshot

pytestmark = pytest.mark.slow


_WORKER = """
import json, os, shutil, signal, sys, tempfile
from pathlib import Path
from cppmega.catalogue import loader as catalogue
from cppmega.overlay import transaction, verbs as overlay
from cppmega.errors import CppmegaError

def child(order):
    catalogue.builtin_folder = lambda: Path(order["pages"])
    os.fsync = lambda handle: None
    seen = []
    def step(name):
        seen.append(name)
        if len(seen) == order["at"]:
            os.kill(os.getpid(), signal.SIGKILL)
    transaction.fault_point = step
    whole = transaction._write_temporary
    def torn(target, data):
        seen.append("")
        if len(seen) == order["at"]:
            whole(target, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        whole(target, data)
    if order["torn"]:
        transaction.fault_point = lambda name: None
        transaction._write_temporary = torn
    session = overlay.Session(Path(order["root"]))
    outcome = overlay.apply(session) if order["verb"] == "apply" else overlay.revert(session)
    sys.exit(0 if outcome.ok else 1)

def warm(order):
    # A first run imports and reads ten times as much as it does otherwise.
    with tempfile.TemporaryDirectory() as folder:
        root = shutil.copytree(order["root"], Path(folder) / "root")
        try:
            child({**order, "root": root, "verb": "apply", "at": 0, "torn": False})
        except SystemExit:
            pass

for number, line in enumerate(sys.stdin):
    order = json.loads(line)
    if number == 0:
        warm(order)
    pid = os.fork()
    if pid == 0:
        try:
            child(order)
        except CppmegaError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(3)
        except SystemExit as done:
            os._exit(done.code)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(4)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


class Killer:
    """A process that forks one child per order, which dies at the step it is told to."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CPPMEGA_")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "PYTHONPATH": str(REPOSITORY)},
        )

    def __call__(self, lab: Lab, verb: str, at: int, torn: bool = False) -> bool:
        """Whether the child was killed; otherwise it must have succeeded."""
        assert self.process.stdin is not None and self.process.stdout is not None
        order = {"root": str(lab.root), "pages": str(lab.pages), "verb": verb, "at": at}
        self.process.stdin.write(json.dumps({**order, "torn": torn}) + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            return True
        assert os.WEXITSTATUS(status) == 0
        return False


@pytest.fixture(scope="module")
def kill() -> Iterator[Killer]:
    killer = Killer()
    yield killer
    assert killer.process.stdin is not None and killer.process.stdout is not None
    killer.process.stdin.close()
    killer.process.stdout.close()
    killer.process.wait()


def _restart(lab: Lab, tree: Path) -> None:
    shutil.rmtree(lab.root)
    shutil.copytree(tree, lab.root)
    for path in (A, B):  # stale bytecode that must not survive a replaced file
        cache = (lab.root / path).parent / "__pycache__"
        cache.mkdir(exist_ok=True)
        for python in ("cpython-311", "cpython-312", "cpython-312.opt-1"):
            (cache / f"{Path(path).stem}.{python}.pyc").write_bytes(b"old")


def _whole(lab: Lab) -> None:
    lab.applied("one", "two")
    assert lab.value("double(3)") == 6 and lab.value("single(3)", B) == 4
    assert not leftovers(lab.root)


def _no_bytecode(lab: Lab, paths: list[str]) -> None:
    found = {path.name.partition(".")[0] for path in lab.root.rglob("*.pyc")}
    assert not found & {Path(path).stem for path in paths}


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("first", ["apply", "revert", "change"])
def test_kill_at_every_step(lab: Lab, kill: Killer, tmp_path: Path, first: str, torn: bool) -> None:
    """kill -9 between any two steps, or in the middle of any write; then the next run finishes,
    and in another try the next run reverts."""
    lab.wheel()
    two_pages(lab)
    if first != "apply":
        lab.apply()
    if first == "change":
        lab.page("one", edit='replacing("x + x", "x * 2")')
    start = tmp_path / "start"
    shutil.copytree(lab.root, start)
    verb = "revert" if first == "revert" else "apply"
    for at in range(1, 100):
        _restart(lab, start)
        old = {path: (lab.root / path).stat().st_ino for path in (A, B)}
        if not kill(lab, verb, at, torn):
            break
        consistent(lab)
        replaced = [path for path in old if (lab.root / path).stat().st_ino != old[path]]
        killed = tmp_path / f"killed-{at}"
        shutil.copytree(lab.root, killed)
        assert lab.apply().ok
        _whole(lab)
        _no_bytecode(lab, replaced)
        shutil.rmtree(lab.root)
        shutil.copytree(killed, lab.root)
        assert lab.revert().ok
        lab.pristine()
        _no_bytecode(lab, replaced)
    else:
        raise AssertionError("the transaction has no end")
    assert at > 3


def test_kill_twice_in_a_row(lab: Lab, kill: Killer, tmp_path: Path) -> None:
    """The run that should have finished the first one is killed as well, with other pages."""
    lab.wheel()
    lab.page("one")
    start = tmp_path / "start"
    shutil.copytree(lab.root, start)
    for first in range(1, 12):
        lab.page("one")
        shutil.rmtree(lab.root)
        shutil.copytree(start, lab.root)
        if not kill(lab, "apply", first):
            break
        once = tmp_path / f"once-{first}"
        shutil.copytree(lab.root, once)
        lab.page("one", edit='replacing("x + x", "x * 2")')
        for verb in ("apply", "revert"):
            for second in range(1 + first % 3, 12, 3):
                shutil.rmtree(lab.root)
                shutil.copytree(once, lab.root)
                if not kill(lab, verb, second):
                    break
                consistent(lab)
                if second % 2:
                    assert lab.apply().ok
                    lab.applied("one")
                    assert "x * 2" in lab.text()
                assert lab.revert().ok
                lab.pristine()


def test_kill_then_the_page_is_gone(lab: Lab, kill: Killer) -> None:
    """The journal knows files that neither receipt nor catalogue mention any more."""
    lab.wheel()
    two_pages(lab)
    assert kill(lab, "apply", 9)  # the first file is replaced
    assert lab.text() != FILES[A].decode() or (lab.root / B).read_bytes() != FILES[B]
    for page in lab.pages.glob("*.py"):
        page.unlink()
    outcome = lab.status()
    assert not outcome.ok and "interrupted" in outcome.notes[0]
    assert lab.apply().ok
    assert {p: d for p, d in snapshot(lab.root).items() if p in FILES} == FILES
    assert not leftovers(lab.root)


def test_kill_then_reinstall(lab: Lab, kill: Killer) -> None:
    lab.wheel()
    two_pages(lab)
    assert kill(lab, "apply", 9)
    for path, data in FILES.items():
        (lab.root / path).write_bytes(data)
    assert lab.apply().ok
    lab.applied("one", "two")


def test_torn_journal_is_said(lab: Lab) -> None:
    """It is renamed into place, so this is an accident of somebody else; it has a name."""
    lab.wheel()
    lab.page()
    lab.apply()
    (lab.root / ".cppmega" / "journal.json").write_text('{"files": 3')
    before = snapshot(lab.root)
    for verb in (lab.apply, lab.status, lab.revert):
        with pytest.raises(CppmegaError) as caught:
            verb()
        assert caught.value.name == "torn-journal"
    assert snapshot(lab.root) == before


def test_fault_while_finishing_a_killed_run(
    lab: Lab, kill: Killer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the next run tries to finish: the killed run's journal must stay."""
    lab.wheel()
    two_pages(lab)
    assert kill(lab, "apply", 9)

    def refuse(name: str) -> None:
        if name == f"replace {B}":
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(transaction, "fault_point", refuse)
        with pytest.raises(CppmegaError):
            lab.apply()
    assert lab.revert().ok
    lab.pristine()
