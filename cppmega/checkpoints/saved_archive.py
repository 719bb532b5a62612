"""Archives that `torch.save` writes: a pickle and the bytes of tensors, each with a checksum."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

_CHUNK = 1 << 23
_PICKLE = "data.pkl"
_UNREADABLE = (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, OverflowError)
"""Exceptions that the standard library raises on damaged archives."""


class Damaged(Exception):  # noqa: N818  (turned into an error where the file is known)
    """The bytes differ from what was written; the message states where."""


def only_pickle(archive: zipfile.ZipFile) -> str:
    """Return the name of the part that holds the pickle.

    Raises:
        Damaged: there is no such part, or there are several.
    """
    names = [name for name in archive.namelist() if name.rpartition("/")[2] == _PICKLE]
    if len(names) != 1:
        raise Damaged(f"it has {len(names)} parts named {_PICKLE}")
    return names[0]


def storage(pickle_name: str, key: str) -> str:
    """Return the name of the part that holds the bytes of a tensor's storage."""
    return f"{pickle_name.removesuffix(_PICKLE)}data/{key}"


def check(file: BinaryIO) -> None:
    """Compare every part with its checksum.

    Raises:
        Damaged: it is not an archive, or a checksum differs.
    """
    with opened(file) as archive:
        for member in archive.infolist():
            _check_member(archive, member)


def window(path: Path, offset: int, length: int) -> BinaryIO:
    """Open a part of a file as a separate file, which is read lazily."""
    return io.BufferedReader(_Window(path, offset, length))


def opened(file: BinaryIO) -> zipfile.ZipFile:
    """Open an archive, none of whose parts may be compressed.

    Raises:
        Damaged: it is not an archive of `torch.save`.
    """
    try:
        archive = zipfile.ZipFile(file)
    except _UNREADABLE as error:
        raise Damaged(f"it is not an archive of torch.save: {error}") from error
    packed = [one.filename for one in archive.infolist() if one.compress_type != zipfile.ZIP_STORED]
    if packed:
        archive.close()
        raise Damaged(f"its part {packed[0]} is compressed, which torch does not do")
    return archive


def _check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    try:
        with archive.open(member) as part:
            while part.read(_CHUNK):
                pass
    except _UNREADABLE as error:
        raise Damaged(f"its part {member.filename}: {error}") from error


def read(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read one part, and compare it with its checksum.

    Raises:
        Damaged: it is missing, or the checksum differs.
    """
    try:
        return archive.read(name)
    except (*_UNREADABLE, KeyError) as error:
        raise Damaged(f"its part {name}: {error}") from error


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
