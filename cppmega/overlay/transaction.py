"""Write a set of files so that a kill at any instant loses nothing.

Everything that needs disk space is written before the first file changes: the originals, the new
texts under temporary names next to their targets, the new receipt and finally the journal. Only
renames and unlinks follow. A process that finds a journal knows which bytes cppmega wrote.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cppmega.errors import CppmegaError
from cppmega.host import json_text
from cppmega.overlay.receipt import FOLDER, Receipt, Written, folder, refuse_link
from cppmega.tree.installed import Tree, sha256

SUFFIX = ".cppmega-new"
UNFINISHED = "unfinished"
"""Exists while a transaction runs; after a kill it tells the next run to clean up."""
LOCK_SECONDS = 120


def fault_point(name: str) -> None:
    """Do nothing before each step of a transaction; fault tests replace this with a kill."""


class ReadOnlyTreeError(CppmegaError):
    """The tree, or the overlay's folder in it, cannot be written."""


@contextmanager
def locked(tree: Tree, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the tree's lock; other processes wait for it.

    Raises:
        CppmegaError: `read-only-tree`, `locked-tree`, `linked-receipt`.
    """
    refuse_link(tree)
    place = folder(tree)
    with _named_faults(tree):
        handle = _acquire(place, say)
    try:
        yield
    finally:
        # A waiting process notices that the file is gone, and creates a new one.
        if not any(entry.name != "lock" for entry in place.iterdir()):
            shutil.rmtree(place, ignore_errors=True)
        os.close(handle)


def _acquire(place: Path, say: Callable[[str], None]) -> int:
    """Open and lock the lock file; a killed process leaves no lock behind.

    `filelock` does not fit here. It keeps its file, whereas the last process to leave removes the
    folder with the lock in it, so that a reverted tree contains no trace of cppmega. A lock on a
    file that has been removed meanwhile must not count, which only its holder can detect.
    """
    began = time.monotonic()
    announced = False
    while time.monotonic() - began < LOCK_SECONDS:
        try:
            place.mkdir(exist_ok=True)
            _as_around(place)
            handle = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            _as_around(place / "lock")
        except FileNotFoundError:
            continue  # its last user removed the folder just now
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_nlink:
                return handle
        except BlockingIOError:
            if not announced and time.monotonic() - began > 0.2:
                say(f"waiting for another process that patches {place.parent}")
                announced = True
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        time.sleep(0.02)
    raise CppmegaError(
        "locked-tree",
        f"Another process has held {place / 'lock'} for {LOCK_SECONDS} seconds.",
        "Two processes that write at once would corrupt files.",
        "wait for that process, or end it, then run `python -m cppmega.apply_patches` again",
    )


class _Journal(msgspec.Struct):
    """The files that an unfinished transaction has written or was about to write."""

    files: dict[str, tuple[Written, ...]]


def interrupted(tree: Tree) -> dict[str, tuple[Written, ...]]:
    """Hashes of the texts that unfinished transactions wrote or were about to write, by path.

    The journal is put in place by a rename, so it is complete or absent.
    """
    data = tree.read(f"{FOLDER}/journal.json")
    if data is None:
        return {}
    try:
        return json_text.decode(data, _Journal).files
    except (msgspec.MsgspecError, ValueError) as error:
        raise CppmegaError(
            "torn-journal",
            f"{folder(tree) / 'journal.json'} cannot be read: {error}.",
            "It records which files an interrupted run was writing.",
            f"{tree.restore('megatron/core/__init__.py')}; mv {folder(tree)} {folder(tree)}.moved; "
            "then python -m cppmega.apply_patches",
        ) from None


@dataclass(frozen=True, slots=True)
class FileChange:
    """The new and the pristine bytes of one file."""

    data: bytes
    pristine: bytes


def commit(tree: Tree, changes: Mapping[str, FileChange], receipt: Receipt | None) -> None:
    """Replace the files, then the receipt; on any failure, restore everything.

    Args:
        changes: path -> new bytes, and the pristine bytes that are kept for later.
        receipt: the new receipt; None removes the old one and every kept original.

    Raises:
        CppmegaError: `disk-full`, `read-only-tree`, `linked-tree`, `write-failed`, `torn-write`,
            `changed-meanwhile`, `rollback-failed`.
    """
    place = folder(tree)
    before = interrupted(tree)
    with _named_faults(tree):
        try:
            (place / UNFINISHED).touch()
            _as_around(place / UNFINISHED)
            _clean_up(tree, before)
            _stage_all(tree, changes, receipt, before)
        except BaseException:
            _unstage(tree, journal=bool(before))
            raise
        replaced: list[str] = []
        try:
            _replace_all(tree, changes, receipt, replaced)
        except BaseException:
            _roll_back(tree, replaced, journal=bool(before))
            raise
    with _named_faults(tree, "The change itself is complete."):
        fault_point("forget originals")
        _forget(place, receipt)
        fault_point("forget journal")
        (place / "journal.json").unlink(missing_ok=True)
        (place / UNFINISHED).unlink(missing_ok=True)


def _stage_all(
    tree: Tree,
    changes: Mapping[str, FileChange],
    receipt: Receipt | None,
    before: Mapping[str, tuple[Written, ...]],
) -> None:
    """Write everything that needs disk space; the journal comes last."""
    place = folder(tree)
    for path, change in changes.items():
        _refuse_link(tree, path)
        fault_point(f"original {path}")
        kept = place / "originals" / sha256(change.pristine)
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            _as_around(kept.parent)
            _write(kept, change.pristine)
        fault_point(f"stage {path}")
        _stage(tree.root / path, change.data)
    fault_point("stage receipt")
    if receipt is not None:
        _write_temporary(place / "receipt.json", receipt.dump())
    fault_point("journal")
    # Entries of an interrupted run stay in the journal until this one is complete.
    written = dict(before)
    for path, change in changes.items():
        now = Written(sha256(change.pristine), sha256(change.data))
        written[path] = (*written.get(path, ()), now)
    _write(place / "journal.json", msgspec.json.encode(_Journal(written)))


def _refuse_link(tree: Tree, path: str) -> None:
    parent = (tree.root / path).parent
    if parent.resolve() != tree.root.resolve() / Path(path).parent:
        raise CppmegaError(
            "linked-tree",
            f"{parent} is a link, or lies below one, and leads to {parent.resolve()}.",
            "Patching through the link would affect everyone else who uses that folder.",
            "install a copy (uv: --link-mode=copy)",
        )
    file = tree.root / path
    if file.is_symlink() and tree.pristine(path)[0] != "record":
        # An installer may link single files into its cache; RECORD vouches for their contents.
        raise CppmegaError(
            "linked-tree",
            f"{file} is a link to {file.resolve()}, and no RECORD vouches for its contents.",
            "The patch would replace the link, and the file that it points to would stay "
            "unpatched for everyone who uses it.",
            f"replace the link with a copy: cp --remove-destination {file.resolve()} {file}",
        )


def _clean_up(tree: Tree, before: Iterable[str]) -> None:
    """Remove what killed runs left: temporary files, and bytecode of the files they replaced."""
    for place in (folder(tree), *tree.packages):
        for where, _, files in os.walk(place):
            for name in files:
                if name.endswith(SUFFIX):
                    (Path(where) / name).unlink(missing_ok=True)
    for path in before:
        drop_bytecode(tree.root / path)


def _unstage(tree: Tree, journal: bool) -> None:
    """Undo the staging; the journal stays if an earlier run needs it."""
    with contextlib.suppress(OSError):
        _clean_up(tree, ())
    if not journal:
        (folder(tree) / "journal.json").unlink(missing_ok=True)
        (folder(tree) / UNFINISHED).unlink(missing_ok=True)
        if not (folder(tree) / "receipt.json").exists():
            _forget(folder(tree), None)


def drop_bytecode(path: Path) -> None:
    """Remove the bytecode of one source file, for every Python version.

    A file rewritten within one second at the same size would otherwise keep its old bytecode.
    """
    import importlib.util

    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink(missing_ok=True)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _replace_all(
    tree: Tree, changes: Mapping[str, FileChange], receipt: Receipt | None, replaced: list[str]
) -> None:
    for path in changes:
        fault_point(f"replace {path}")
        if (tree.root / path).read_bytes() != tree.read(path):
            raise CppmegaError(
                "changed-meanwhile",
                f"{path} was changed by another program while it was being patched.",
                "That change would be silently lost.",
                "let pip or the other tool finish, then run `python -m cppmega.apply_patches`",
            )
        replaced.append(path)
        _temporary(tree.root / path).replace(tree.root / path)
        fault_point(f"bytecode {path}")
        drop_bytecode(tree.root / path)
    for path, change in changes.items():
        fault_point(f"read back {path}")
        if (tree.root / path).read_bytes() != change.data:
            raise CppmegaError(
                "torn-write",
                f"{path} does not contain what was just written to it.",
                "Another process writes the same file, or the disk is failing.",
                "end the other process and run `python -m cppmega.apply_patches` again",
            )
    place = folder(tree)
    fault_point("receipt")
    if receipt is None:
        (place / "receipt.json").unlink(missing_ok=True)
    else:
        _temporary(place / "receipt.json").replace(place / "receipt.json")
    _sync_folder(place)


def _roll_back(tree: Tree, replaced: Iterable[str], journal: bool) -> None:
    try:
        for path in replaced:
            data = tree.read(path)
            if data is not None and (tree.root / path).read_bytes() != data:
                _stage(tree.root / path, data)
                _temporary(tree.root / path).replace(tree.root / path)
            drop_bytecode(tree.root / path)
    except OSError as error:
        raise CppmegaError(
            "rollback-failed",
            f"A write failed, and so did restoring the files: {error}.",
            "Some files are patched and some are not; the journal records which.",
            "fix the cause and run `python -m cppmega.apply_patches` again, or `cppmega revert`",
        ) from error
    _unstage(tree, journal)


def _forget(place: Path, receipt: Receipt | None) -> None:
    """Remove the originals that the receipt no longer names."""
    named = {file.before for file in receipt.files.values()} if receipt is not None else set()
    for kept in (place / "originals").glob("*"):
        if kept.name not in named:
            kept.unlink(missing_ok=True)
    if not named:
        shutil.rmtree(place / "originals", ignore_errors=True)


def _stage(target: Path, data: bytes) -> None:
    """Write new bytes next to the target, with its permissions and owner."""
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
    _as_around(_temporary(target))


def _as_around(path: Path) -> None:
    """Give a file or folder the owner and the access of the folder that it is in.

    Whoever may read the tree has to read its receipt, whatever the umask, and its owner has to be
    able to revert what root applied.
    """
    around, own = path.parent.stat(), path.stat()
    mode = around.st_mode & (0o7777 if path.is_dir() else 0o666)
    with contextlib.suppress(PermissionError):  # another user's, who has done it
        if (own.st_uid, own.st_gid) != (around.st_uid, around.st_gid):
            os.chown(path, around.st_uid, around.st_gid)
        if own.st_mode & 0o7777 != mode:
            path.chmod(mode)


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}{SUFFIX}")


def _sync_folder(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot sync folders
            os.fsync(handle)
    finally:
        os.close(handle)


def _way_to_write(tree: Tree) -> str:
    place, user = folder(tree), os.geteuid()
    if place.is_dir() and tree.root.stat().st_uid == user != place.stat().st_uid:
        return f"sudo chown -R --reference {tree.root} {place} (another user applied the patches)"
    return "create your own environment with python -m venv, or copy the tree and pass --megatron"


@contextmanager
def _named_faults(tree: Tree, done: str = "Nothing was changed.") -> Iterator[None]:
    """Turn errors of the operating system into named errors."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CppmegaError(
                "disk-full",
                f"There is no disk space left below {tree.root}. {done}",
                "A half-written file would break the import of megatron.",
                "free some space and run `python -m cppmega.apply_patches` again",
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise ReadOnlyTreeError(
                "read-only-tree",
                f"{error.filename or tree.root} cannot be written. {done}",
                "The patches must be written where Python imports megatron from.",
                _way_to_write(tree),
            ) from error
        raise CppmegaError(
            "write-failed",
            f"{error.strerror}: {error.filename or tree.root}. {done}",
            "The patches could not be written completely.",
            (
                f"move {error.filename} away, since cppmega needs a folder there"
                if isinstance(error, FileExistsError | NotADirectoryError)
                else "fix the cause"
            )
            + "; then `python -m cppmega.apply_patches` again",
        ) from error
