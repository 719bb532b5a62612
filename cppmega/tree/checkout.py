"""Read the commit of a git checkout without git.

Git runs programs that a repository's own configuration names: a file system monitor, hooks,
filters, the transport of a lazy fetch. A checkout of unknown origin would decide what runs here.
Dulwich reads the objects and runs none of these.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dulwich.object_store import DiskObjectStore


@dataclass(frozen=True)
class Checkout:
    """The part of a commit that lies below one folder."""

    commit: str
    files: Mapping[str, str]
    """Path relative to the folder -> name of its blob."""
    _common: Path

    def blob(self, path: str) -> bytes | None:
        """Read the committed bytes of a file; None if they are not on this machine."""
        from dulwich.objects import ObjectID

        name = self.files[path]
        try:
            with closing(_objects(self._common, name)) as objects:
                return objects[ObjectID(name.encode())].as_raw_string()
        except Exception:  # a partial clone has not fetched it, or the repository is damaged
            return None


def find_checkout(folder: Path, below: str) -> Checkout | None:
    """Find the checkout that tracks `folder/below`; None if no commit contains any of it.

    A virtual environment inside another repository is not a checkout: nothing in it is tracked.
    """
    folder = folder.resolve()
    work = next((p for p in (folder, *folder.parents) if (p / ".git").exists()), None)
    if work is None:
        return None  # the usual case, which avoids the cost of importing dulwich
    try:
        return _read(work, (folder.relative_to(work) / below).as_posix(), below)
    except Exception:  # no commit, an unknown format, objects never fetched: it vouches for nothing
        return None


def same(data: bytes, blob: str) -> bool:
    """Whether bytes are those of a blob, with its line endings or with those of Windows.

    A checkout with `core.autocrlf` has different bytes but the same code.
    """
    return _name(data, blob) == blob or (
        b"\r\n" in data and _name(data.replace(b"\r\n", b"\n"), blob) == blob
    )


def as_checked_out(blob: bytes, data: bytes | None) -> bytes:
    """Convert committed bytes to the line endings of the file in the working tree."""
    if data is not None and b"\r\n" in data and b"\r\n" not in blob:
        return blob.replace(b"\n", b"\r\n")
    return blob


def _name(data: bytes, like: str) -> str:
    kind = hashlib.sha1 if len(like) == 40 else hashlib.sha256
    return kind(b"blob %d\0" % len(data) + data).hexdigest()


def _read(work: Path, inside: str, below: str) -> Checkout | None:
    """Read the part of HEAD that lies below one folder.

    Args:
        work: the folder of the working tree.
        inside: the folder to read, relative to `work`.
        below: the folder with which the resulting paths begin.
    """
    from dulwich.object_store import iter_tree_contents, tree_lookup_path
    from dulwich.objects import Commit
    from dulwich.refs import DiskRefsContainer, Ref

    control, common = _places(work)
    head = DiskRefsContainer(common, control)[Ref(b"HEAD")]
    with closing(_objects(common, head.decode())) as objects:
        commit = objects[head]
        assert isinstance(commit, Commit)
        mode, tree = tree_lookup_path(objects.__getitem__, commit.tree, inside.encode())
        files = {
            f"{below}/{entry.path.decode()}": entry.sha.decode()
            for entry in (iter_tree_contents(objects, tree) if stat.S_ISDIR(mode) else ())
            if stat.S_ISREG(entry.mode)
        }
    return Checkout(commit.id.decode(), files, common) if files else None


def _places(work: Path) -> tuple[Path, Path]:
    """The repository of a working tree, and the one with which it shares objects and branches."""
    control = work / ".git"
    if control.is_file():  # a worktree or a submodule
        control = work / control.read_text().removeprefix("gitdir: ").rstrip("\r\n")
    named = control / "commondir"
    return control, control / named.read_text().strip() if named.is_file() else control


def _objects(common: Path, name: str) -> DiskObjectStore:
    """Open the object store of a repository, which uses either SHA-1 or SHA-256 names."""
    from dulwich.object_format import SHA1, SHA256
    from dulwich.object_store import DiskObjectStore

    kind = SHA1 if len(name) == 40 else SHA256
    return DiskObjectStore(common / "objects", object_format=kind)
