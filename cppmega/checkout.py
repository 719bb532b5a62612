"""What a git checkout's commit holds, read without git.

Git runs programs that a repository's own configuration names: a file system monitor, hooks,
filters, the transport of a lazy fetch. Somebody else's checkout would decide what runs here.
Dulwich reads the objects and knows none of these.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dulwich.objects import ObjectID
    from dulwich.repo import Repo


@dataclass(frozen=True)
class Checkout:
    """The part of a commit that lies below one folder."""

    commit: str
    files: Mapping[str, str]
    """Path relative to the folder -> name of its blob."""
    _repository: Repo

    def blob(self, path: str) -> bytes | None:
        """The committed bytes of a file; None where they are not on this machine."""
        try:
            return self._repository.object_store[_object_id(self.files[path])].as_raw_string()
        except Exception:  # a partial clone has not fetched it, or the repository is damaged
            return None


def of(folder: Path, below: str = "") -> Checkout | None:
    """The checkout that tracks `folder/below`; None where no commit has anything of it.

    A virtual environment inside some other repository is not a checkout: nothing of it is tracked.
    """
    folder = folder.resolve()
    if not any((place / ".git").exists() for place in (folder, *folder.parents)):
        return None  # the usual case, without the time that the import takes
    from dulwich.repo import Repo

    try:
        return _read(Repo.discover(folder), folder, below)
    except Exception:  # no commit, an unknown format, objects never fetched: it vouches for nothing
        return None


def same(data: bytes, blob: str) -> bool:
    """Whether bytes are a blob's, in the committed line ends or in those of Windows.

    A checkout with `core.autocrlf` has other bytes and the same code.
    """
    return _name(data, blob) == blob or (
        b"\r\n" in data and _name(data.replace(b"\r\n", b"\n"), blob) == blob
    )


def as_checked_out(blob: bytes, data: bytes | None) -> bytes:
    """The committed bytes with the line ends that the file in the working tree has."""
    if data is not None and b"\r\n" in data and b"\r\n" not in blob:
        return blob.replace(b"\n", b"\r\n")
    return blob


def _name(data: bytes, like: str) -> str:
    kind = hashlib.sha1 if len(like) == 40 else hashlib.sha256
    return kind(b"blob %d\0" % len(data) + data).hexdigest()


def _object_id(name: str) -> ObjectID:
    from dulwich.objects import ObjectID

    return ObjectID(name.encode())


def _read(repository: Repo, folder: Path, below: str) -> Checkout | None:
    from dulwich.object_store import iter_tree_contents, tree_lookup_path
    from dulwich.objects import Commit

    if repository.bare:
        return None  # a folder that looks like a repository's inside tracks no file here
    inside = (folder.relative_to(Path(repository.path).resolve()) / below).as_posix()
    commit = repository[repository.head()]
    assert isinstance(commit, Commit)
    tree = commit.tree
    if inside != ".":
        mode, tree = tree_lookup_path(repository.get_object, tree, inside.encode())
        if not stat.S_ISDIR(mode):
            return None
    prefix = f"{below}/" if below else ""
    files = {
        prefix + entry.path.decode(): entry.sha.decode()
        for entry in iter_tree_contents(repository.object_store, tree)
        if stat.S_ISREG(entry.mode)
    }
    return Checkout(commit.id.decode(), files, repository) if files else None
