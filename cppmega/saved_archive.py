"""Archives that `torch.save` writes: a pickle and the bytes of tensors, each with a checksum."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from cppmega import inert_pickle

_CHUNK = 1 << 23
_PICKLE = "data.pkl"
_BYTES = ("ByteStorage", "UntypedStorage")
_UNREADABLE = (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, OverflowError)
"""What the standard library raises on damaged archives."""


class Damaged(Exception):  # noqa: N818  (turned into an error where the file is known)
    """The bytes are not what was written; the message says where."""


def load(file: BinaryIO) -> Any:
    """The content of an archive, with stand-ins for its objects, its pickles checked inside too.

    Raises:
        Damaged: it is not an archive, or a checksum differs.
        inert_pickle.NotListed: a pickle in it names something else than what checkpoints hold.
    """
    with _opened(file) as archive:
        names = [name for name in archive.namelist() if name.rpartition("/")[2] == _PICKLE]
        if len(names) != 1:
            raise Damaged(f"it has {len(names)} parts named {_PICKLE}")
        storages: list[Any] = []
        found = _unpickled(_read(archive, names[0]), storages.append)
        folder = names[0].removesuffix(_PICKLE)
        for key in _of_bytes(storages):
            inert_pickle.refuse_nested(_read(archive, f"{folder}data/{key}"))
        return found


def _of_bytes(storages: Iterable[Any]) -> set[str]:
    """Tensors of bytes, in which Transformer Engine keeps the pickle of its state."""
    found = set()
    for pid in storages:
        match pid:
            case ("storage", kind, str(key), *_) if inert_pickle.plain(kind) in _BYTES:
                found.add(key)
    return found


def check(file: BinaryIO) -> None:
    """Compare every part with its checksum.

    Raises:
        Damaged: it is not an archive, or a checksum differs.
    """
    with _opened(file) as archive:
        for member in archive.infolist():
            _go_through(archive, member)


def window(path: Path, offset: int, length: int) -> BinaryIO:
    """A part of a file as a file of its own, which is read only as far as it is asked for."""
    return io.BufferedReader(_Window(path, offset, length))


def _opened(file: BinaryIO) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(file)
    except _UNREADABLE as error:
        raise Damaged(f"it is not an archive of torch.save: {error}") from error
    packed = [one.filename for one in archive.infolist() if one.compress_type != zipfile.ZIP_STORED]
    if packed:
        archive.close()
        raise Damaged(f"its part {packed[0]} is compressed, which torch does not do")
    return archive


def _go_through(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    try:
        with archive.open(member) as part:
            while part.read(_CHUNK):
                pass
    except _UNREADABLE as error:
        raise Damaged(f"its part {member.filename}: {error}") from error


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except (*_UNREADABLE, KeyError) as error:
        raise Damaged(f"its part {name}: {error}") from error


def _unpickled(data: bytes, storage: Callable[[Any], object]) -> Any:
    try:
        return inert_pickle.loads(data, storage)
    except (inert_pickle.NotListed, Damaged):
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise Damaged(f"its pickle: {type(error).__name__}: {error}") from error


class _Window(io.RawIOBase):
    def __init__(self, path: Path, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._at = path.open("rb"), offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._offset + self._at)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()
