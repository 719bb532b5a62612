"""Kills, full disks, many writers: whatever happens, the next run finishes or rolls back."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.overlay import transaction
from tests.support import outputs
from tests.support.lab import FILES, REPOSITORY, A, B, Lab
from tests.support.made import leftovers, snapshot

pytestmark = pytest.mark.slow


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


_WORKER = """
import json, os, signal, sys
from pathlib import Path
import cppmega.rewriting.rewrite  # what every child needs is imported once
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

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            child(json.loads(line))
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


def _two_pages(lab: Lab) -> None:
    lab.page("one")
    lab.page("two", f"{B}:single", 'replacing("x", "x + 1", times=1)')


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


def _consistent(lab: Lab) -> None:
    """After a kill every file is whole: it is one of the texts that it may be."""
    for path in (A, B):
        compile((lab.root / path).read_bytes(), path, "exec")


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("first", ["apply", "revert", "change"])
def test_kill_at_every_step(lab: Lab, kill: Killer, tmp_path: Path, first: str, torn: bool) -> None:
    """kill -9 between any two steps, or in the middle of any write; then the next run finishes,
    and in another try the next run reverts."""
    lab.wheel()
    _two_pages(lab)
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
        _consistent(lab)
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
                _consistent(lab)
                if second % 2:
                    assert lab.apply().ok
                    lab.applied("one")
                    assert "x * 2" in lab.text()
                assert lab.revert().ok
                lab.pristine()


def test_kill_then_the_page_is_gone(lab: Lab, kill: Killer) -> None:
    """The journal knows files that neither receipt nor catalogue mention any more."""
    lab.wheel()
    _two_pages(lab)
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
    _two_pages(lab)
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


# -- refusals of the operating system -----------------------------------------------------------


def _steps(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: Any) -> list[str]:
    """Names of the steps of a verb on the tree as it stands, which is put back."""
    names: list[str] = []
    start = tmp_path / "start"
    shutil.copytree(lab.root, start)
    with monkeypatch.context() as patch:
        patch.setattr(transaction, "fault_point", names.append)
        verb()
    shutil.rmtree(lab.root)
    shutil.copytree(start, lab.root)
    return names


@pytest.mark.parametrize(
    ("number", "reported"), [(errno.EROFS, "drifted"), (errno.EIO, "write-failed")]
)
def test_failing_page_is_reported_where_the_lock_cannot_be_taken(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, number: int, reported: str
) -> None:
    """No other process can be writing to a read-only tree, so its pages are judged unlocked."""
    lab.wheel()
    lab.page()
    lab.apply()
    lab.change(A, b"2 * x", b"4 * x")

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(transaction, "_acquire", refuse)
    if reported == "drifted":
        assert lab.refused().state == reported
    else:
        with pytest.raises(CppmegaError) as caught:
            lab.apply()
        assert caught.value.name == reported


@pytest.mark.parametrize("verb", ["apply", "revert"])
@pytest.mark.parametrize(
    ("number", "name"),
    [
        (errno.ENOSPC, "disk-full"),
        (errno.EDQUOT, "disk-full"),
        (errno.EROFS, "read-only-tree"),
        (errno.EIO, "write-failed"),
    ],
)
def test_refused_step_changes_nothing(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str, number: int, name: str
) -> None:
    """Disk full at every step: the tree is as before, to the byte, and the error has a name."""
    lab.wheel()
    _two_pages(lab)
    if verb == "revert":
        lab.apply()
    run = lab.apply if verb == "apply" else lab.revert
    before = snapshot(lab.root)
    steps = _steps(lab, monkeypatch, tmp_path, run)
    assert len(steps) > 10
    for at, step in enumerate(steps):
        seen: list[str] = []

        def refuse(name: str, at: int = at, seen: list[str] = seen) -> None:
            seen.append(name)
            if len(seen) == at + 1:
                raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(transaction, "fault_point", refuse)
            with pytest.raises(CppmegaError) as caught:
                run()
        assert caught.value.name == name
        if step.startswith("forget"):  # behind the point of no return: it says so
            assert "complete" in caught.value.what
            assert run().ok
            break
        assert "Nothing was changed" in caught.value.what
        assert snapshot(lab.root) == before, step
        assert not leftovers(lab.root)
    else:
        raise AssertionError("no step behind the commit")


def test_full_disk_in_the_middle_of_every_write(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the bytes fit: no half file is ever seen under its real name."""
    lab.wheel()
    _two_pages(lab)
    before = snapshot(lab.root)
    whole = transaction._write_temporary
    for at in range(1, 20):
        count = 0

        def torn(target: Path, data: bytes, at: int = at) -> None:
            nonlocal count
            count += 1
            if count == at:
                whole(target, data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            whole(target, data)

        with monkeypatch.context() as patch:
            patch.setattr(transaction, "_write_temporary", torn)
            try:
                outcome = lab.apply()
            except CppmegaError as error:
                assert error.name == "disk-full"
                assert snapshot(lab.root) == before
                assert not (lab.root / ".cppmega").exists()
                continue
        assert outcome.ok
        break
    assert at > 5
    lab.applied("one", "two")


def test_rollback_that_fails_is_said_and_can_be_finished(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up for good after the first rename: the journal stays, the next run works."""
    lab.wheel()
    _two_pages(lab)
    full = False
    whole = transaction._write_temporary

    def refuse(name: str) -> None:
        nonlocal full
        if name == f"replace {B}":
            full = True
            raise OSError(errno.ENOSPC, "No space left on device")

    def write(target: Path, data: bytes) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(target, data)

    for recover in (lab.apply, lab.revert):
        with monkeypatch.context() as patch:
            patch.setattr(transaction, "fault_point", refuse)
            patch.setattr(transaction, "_write_temporary", write)
            with pytest.raises(CppmegaError) as caught:
                lab.apply()
        assert caught.value.name == "rollback-failed"
        assert not lab.status().ok
        full = False
        assert recover().ok
        assert not leftovers(lab.root)
        lab.revert()
        lab.pristine()


def test_fault_while_finishing_a_killed_run(
    lab: Lab, kill: Killer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the next run tries to finish: the killed run's journal must stay."""
    lab.wheel()
    _two_pages(lab)
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


def test_interrupt_from_the_keyboard(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C at every step: rolled back, or finished by the next run."""
    lab.wheel()
    _two_pages(lab)
    before = snapshot(lab.root)
    for at, step in enumerate(_steps(lab, monkeypatch, tmp_path, lab.apply)):
        count = 0

        def interrupt(name: str, at: int = at) -> None:
            nonlocal count
            count += 1
            if count == at + 1:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(transaction, "fault_point", interrupt)
            with pytest.raises(KeyboardInterrupt):
                lab.apply()
        if step.startswith("forget"):
            assert lab.apply().ok
            break
        assert snapshot(lab.root) == before, step


def test_real_full_disk(lab: Lab, tmp_path: Path) -> None:
    """A tmpfs with room for the tree and not for the patch, in a mount namespace of its own."""
    lab.files["megatron/core/a.py"] = FILES[A] + b"# " + b"x" * 30_000 + b"\n"
    lab.wheel()
    _two_pages(lab)
    small = tmp_path / "small"
    small.mkdir()
    script = f"""
set -e
mount -t tmpfs -o size=80k tmpfs {small}
cp -r {lab.root}/. {small}/
find {small} -type f -exec sha256sum {{}} + | sort > {tmp_path}/before
set +e
"$@"
echo "exit $?"
find {small} -type f -exec sha256sum {{}} + | sort > {tmp_path}/after
"""
    command = lab.command("apply", "--json", "--megatron", str(small))
    for isolated in (["unshare", "-m"], ["unshare", "-r", "-m"]):
        done = subprocess.run(
            [*isolated, "sh", "-c", script, "sh", *command],
            env=lab.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if "exit" in done.stdout:
            break
    else:
        pytest.skip(f"this machine lets nobody mount a tmpfs: {done.stderr.strip()}")
    assert "exit 1" in done.stdout, done
    assert '"name": "disk-full"' in done.stdout
    assert (tmp_path / "before").read_text() == (tmp_path / "after").read_text()


# -- several writers ----------------------------------------------------------------------------


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
    _two_pages(lab)
    answers = _together(lab, *["apply"] * 8)
    assert [code for code, _, _ in answers] == [0] * 8, answers
    assert sum("changed 2 files" in err for _, _, err in answers) == 1
    lab.applied("one", "two")
    assert not leftovers(lab.root)


def test_processes_that_apply_and_revert_at_once(lab: Lab) -> None:
    """The folder with the lock comes and goes: two must never believe to hold it."""
    lab.wheel()
    _two_pages(lab)
    answers = _together(lab, *["apply", "revert"] * 4)
    assert not [err for code, _, err in answers if code not in (0, 1) or "Traceback" in err]
    _consistent(lab)
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
    _two_pages(lab)

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
    _two_pages(lab)

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


# -- bytecode -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [False, True])
def test_same_second_same_size(lab: Lab, tmp_path: Path, prefix: bool) -> None:
    """Python trusts bytecode whose source has the same second and size; ours has both here."""
    lab.export()
    how = {"edit": "body_of(patched)", "code": "def patched(x):\n    return 7\n"}
    lab.page(**how)
    lab.apply()
    longer = len((lab.root / A).read_bytes()) - len(FILES[A])
    shutil.rmtree(lab.root)
    # The patch drops this comment with the body, so both texts now have one length.
    lab.files[A] = FILES[A].replace(b"# the sum", b"# the sum" + b"-" * longer)
    size = len(lab.files[A])
    lab.wheel()
    lab.page(**how)
    caches = {"PYTHONPYCACHEPREFIX": str(tmp_path / "cache")} if prefix else {}
    environment = lab.environment(PYTHONDONTWRITEBYTECODE="", **caches)
    second = (lab.root / A).stat().st_mtime

    def value() -> str:
        os.utime(lab.root / A, (second, second))
        done = subprocess.run(
            [sys.executable, "-c", "from megatron.core import a; print(a.double(4))"],
            env={**environment, "PYTHONPATH": str(lab.root)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    assert value() == "8"
    everything = [*lab.root.rglob("a.*.pyc"), *tmp_path.glob("cache/**/a.*.pyc")]
    assert len(everything) == 1
    assert lab.run("apply", env=environment).returncode == 0
    assert (lab.root / A).stat().st_size == size
    assert value() == "7"
    assert lab.run("revert", env=environment).returncode == 0
    assert value() == "8"


@pytest.mark.parametrize("taken", [".cppmega", ".cppmega/originals"])
def test_a_file_where_our_folder_must_be(lab: Lab, taken: str) -> None:
    lab.wheel()
    lab.page()
    (lab.root / taken).parent.mkdir(exist_ok=True)
    (lab.root / taken).write_text("")
    with pytest.raises(CppmegaError) as caught:
        lab.apply()
    assert caught.value.name == "write-failed" and f"move {lab.root / taken}" in caught.value.next
    (lab.root / taken).unlink()
    assert lab.apply().ok
