"""Full disks, refused writes, Ctrl-C: nothing is changed, or the next run finishes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.overlay import transaction
from tests.overlay.two_pages import two_pages
from tests.support.lab import FILES, A, B, Lab
from tests.support.made import leftovers, snapshot

pytestmark = pytest.mark.slow


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
    two_pages(lab)
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
    two_pages(lab)
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
    two_pages(lab)
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


def test_interrupt_from_the_keyboard(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C at every step: rolled back, or finished by the next run."""
    lab.wheel()
    two_pages(lab)
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
    two_pages(lab)
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


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o000])
@pytest.mark.parametrize("mode", [0o755, 0o750, 0o775])
def test_receipt_has_the_access_of_its_tree(lab: Lab, mask: int, mode: int) -> None:
    lab.wheel()
    lab.page()
    lab.root.chmod(mode)
    before = os.umask(mask)
    try:
        lab.apply()
    finally:
        os.umask(before)
    (place,) = (path.parent for path in lab.root.glob("*/receipt.json"))
    for path in (place, *place.rglob("*")):
        wanted = mode if path.is_dir() else mode & 0o666
        assert path.stat().st_mode & 0o777 == wanted, path
    lab.revert()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write to another user's tree")
def test_roots_receipt_belongs_to_the_owner_of_the_tree(lab: Lab) -> None:
    lab.wheel()
    lab.page()
    for path in (lab.root, *lab.root.rglob("*")):
        os.chown(path, 12345, 54321)
    lab.apply()
    kept = [path for path in lab.root.rglob("*") if "__pycache__" not in str(path)]
    assert any(path.name == "receipt.json" for path in kept)
    assert {(path.stat().st_uid, path.stat().st_gid) for path in kept} == {(12345, 54321)}
