"""Write a set of files so that a kill at any instant loses nothing.

Everything that needs room on the disk is written before the first file changes: originals, new
texts under temporary names beside their targets, the new receipt. Then the journal, then nothing
but renames and unlinks. Whoever finds a journal knows which bytes are ours.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cppmega.diagnose import Written
from cppmega.errors import CppmegaError
from cppmega.receipt import FOLDER, folder
from cppmega.tree import Tree, sha256

SUFFIX = ".cppmega-new"
LOCK_SECONDS = 120

Step = Callable[[str], None]


def _no_step(name: str) -> None:
    """Called before every step; the fault tests put a kill here."""


step: Step = _no_step


@contextmanager
def locked(tree: Tree, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the tree's lock; other processes wait for it.

    Raises:
        CppmegaError: `read-only-tree`, `locked-tree`.
    """
    from filelock import FileLock, Timeout

    place = folder(tree)
    with _named_faults(tree):
        place.mkdir(exist_ok=True)
        lock = FileLock(place / "lock")
    try:
        with _named_faults(tree):
            try:
                lock.acquire(timeout=0.2)
            except Timeout:
                say(f"waiting for another process that patches {tree.root}")
                lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        raise CppmegaError(
            "locked-tree",
            f"Another process has held {place / 'lock'} for {LOCK_SECONDS} seconds.",
            "Two writers at once would tear files.",
            "wait for it, or end it, then run `python -m cppmega.apply_patches` again",
        ) from None
    try:
        yield
    finally:
        # Waiters notice that the file is gone and take a new one.
        if not any(entry.name != "lock" for entry in place.iterdir()):
            shutil.rmtree(place, ignore_errors=True)
        lock.release()


def interrupted(tree: Tree) -> dict[str, Written]:
    """Hashes of what an unfinished transaction wrote or was about to write, by path.

    The journal is put in place by a rename, so it is whole or not there.
    """
    try:
        raw = json.loads((folder(tree) / "journal.json").read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CppmegaError(
            "torn-journal",
            f"{folder(tree) / 'journal.json'} cannot be read: {error}.",
            "It says which files an interrupted run was writing.",
            "reinstall megatron-core, remove the folder .cppmega beside it, and apply again",
        ) from None
    return {path: Written(*entry) for path, entry in raw["files"].items()}


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one file."""

    data: bytes
    pristine: bytes


def commit(tree: Tree, changes: Mapping[str, Change], receipt: bytes | None) -> None:
    """Replace files, then the receipt; on any failure put everything back.

    Args:
        changes: path -> new bytes, and the pristine bytes that are kept for later.
        receipt: the new receipt; None removes it and all that was kept.

    Raises:
        CppmegaError: `disk-full`, `read-only-tree`, `write-failed`, `torn-write`.
    """
    place = folder(tree)
    with _named_faults(tree):
        try:
            _stage_all(tree, changes, receipt)
        except BaseException:
            sweep(tree, changes)
            if not (place / "receipt.json").exists():
                _forget(place)
            raise
        try:
            _replace_all(tree, changes, receipt)
        except Exception:
            _roll_back(tree, changes)
            raise
        if receipt is None:
            step("forget originals")
            _forget(place)
        step("forget journal")
        (place / "journal.json").unlink(missing_ok=True)


def _stage_all(tree: Tree, changes: Mapping[str, Change], receipt: bytes | None) -> None:
    """Everything that needs room on the disk; the journal comes last."""
    place = folder(tree)
    for path, change in changes.items():
        step(f"original {path}")
        kept = place / "originals" / sha256(change.pristine)
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            _write(kept, change.pristine)
        step(f"stage {path}")
        _stage(tree.root / path, change.data)
    step("stage receipt")
    if receipt is not None:
        _write_temporary(place / "receipt.json", receipt)
    step("journal")
    written = {path: (sha256(c.pristine), sha256(c.data)) for path, c in changes.items()}
    _write(place / "journal.json", json.dumps({"files": written}).encode())


def sweep(tree: Tree, paths: Iterable[str]) -> None:
    """Remove temporary files that a killed run left beside its targets."""
    for path in paths:
        _temporary(tree.root / path).unlink(missing_ok=True)
    for leftover in folder(tree).glob(f"**/.*{SUFFIX}"):
        leftover.unlink(missing_ok=True)


def drop_bytecode(path: Path) -> None:
    """Remove the bytecode of one source file, for every Python version.

    A file rewritten within one second at the same size would otherwise keep its old bytecode.
    """
    import importlib.util

    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink(missing_ok=True)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _replace_all(tree: Tree, changes: Mapping[str, Change], receipt: bytes | None) -> None:
    for path in changes:
        step(f"replace {path}")
        _temporary(tree.root / path).replace(tree.root / path)
        step(f"bytecode {path}")
        drop_bytecode(tree.root / path)
    for path, change in changes.items():
        step(f"read back {path}")
        if (tree.root / path).read_bytes() != change.data:
            raise CppmegaError(
                "torn-write",
                f"{path} does not hold what was just written to it.",
                "Another process writes the same file, or the disk is failing.",
                "end the other process and run `python -m cppmega.apply_patches` again",
            )
    place = folder(tree)
    step("receipt")
    if receipt is None:
        (place / "receipt.json").unlink(missing_ok=True)
    else:
        _temporary(place / "receipt.json").replace(place / "receipt.json")
    _sync_folder(place)


def _roll_back(tree: Tree, changes: Mapping[str, Change]) -> None:
    for path in changes:
        data = tree.read(path) or b""
        if (tree.root / path).read_bytes() != data:
            _stage(tree.root / path, data)
            _temporary(tree.root / path).replace(tree.root / path)
            drop_bytecode(tree.root / path)
    sweep(tree, changes)
    (folder(tree) / "journal.json").unlink(missing_ok=True)


def _forget(place: Path) -> None:
    shutil.rmtree(place / "originals", ignore_errors=True)


def _stage(target: Path, data: bytes) -> None:
    """New bytes beside the target, with its permissions and owner."""
    temporary = _temporary(target)
    _write_temporary(target, data)
    before = target.stat()
    temporary.chmod(before.st_mode & 0o7777)
    if before.st_uid != os.geteuid() or before.st_gid != os.getegid():
        with contextlib.suppress(PermissionError):
            os.chown(temporary, before.st_uid, before.st_gid)


def _write(target: Path, data: bytes) -> None:
    _write_temporary(target, data)
    _temporary(target).replace(target)


def _write_temporary(target: Path, data: bytes) -> None:
    with _temporary(target).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}{SUFFIX}")


def _sync_folder(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _named_faults(tree: Tree) -> Iterator[None]:
    """Turn the operating system's refusals into named errors."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CppmegaError(
                "disk-full",
                f"There is no room left below {tree.root}. Nothing was changed.",
                "A half-written file would break the import of megatron.",
                "free some space and run `python -m cppmega.apply_patches` again",
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise CppmegaError(
                "read-only-tree",
                f"{error.filename or tree.root} cannot be written. Nothing was changed.",
                "The patches cannot be put where Python imports megatron from.",
                "use an environment of your own: python -m venv, or copy the tree and pass "
                "--megatron",
            ) from error
        raise CppmegaError(
            "write-failed",
            f"{error.strerror}: {error.filename or tree.root} (in {FOLDER}). Nothing was changed.",
            "The patches could not be written as a whole.",
            "mend the cause and run `python -m cppmega.apply_patches` again",
        ) from error
