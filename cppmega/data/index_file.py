"""The index of a Megatron dataset, `PREFIX.idx`: read without torch, with every number checked.

Megatron maps the file and trusts its contents: a negative length, a pointer into another
document or a count from a torn header becomes a wrong sample or a crash far into the run. Only
what Megatron's own builder writes is accepted: sequences that follow each other without
gap or overlap from the first byte of the data file to the last. A sequence may be empty; Megatron
reads those as nothing. A document that begins at another sequence than before shows only in the
card's hash as long as the documents are in order; GPT datasets do not use documents.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cppmega.errors import CppmegaError

if TYPE_CHECKING:
    import numpy as np

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {
    **{1: ("uint8", 1), 2: ("int8", 1), 3: ("int16", 2), 4: ("int32", 4), 5: ("int64", 8)},
    8: ("uint16", 2),
}
"""Code of an id type -> its name and its size in bytes."""
_FLOATS = (6, 7)
_LENGTH, _POINTER, _MODE = 4, 8, 1
"""Bytes of one number of each list."""
_AT_ONCE = 1 << 20
"""Numbers of a list that are in memory at once."""


@dataclass(frozen=True, slots=True)
class Index:
    """The header of an index whose file has exactly the length that the header implies."""

    path: Path
    dtype: str
    token_bytes: int
    sequences: int
    documents: int
    has_modes: bool
    """Multimodal datasets have one more byte for each sequence."""

    @property
    def _pointers_at(self) -> int:
        return _HEADER.size + _LENGTH * self.sequences

    @property
    def _documents_at(self) -> int:
        return self._pointers_at + _POINTER * self.sequences

    @property
    def _modes_at(self) -> int:
        return self._documents_at + _POINTER * (self.documents + 1)


def read_header(path: Path) -> Index:
    """Read the header; nothing is allocated by its counts before the file is known to hold them.

    Raises:
        CppmegaError: `data-broken`.
    """
    with readable(path), path.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size:
        raise broken(path, "its header is cut off")
    magic, version, code, sequences, entries = _HEADER.unpack(head)
    if magic != _MAGIC or version != 1:
        raise broken(path, "it is not the index of a Megatron dataset")
    if code not in _DTYPES:
        kind = "are floating-point numbers" if code in _FLOATS else f"have the unknown type {code}"
        raise broken(path, f"its tokens {kind}")
    if entries == 0:
        raise broken(path, "its document index is empty, and begins with a 0 in every dataset")
    dtype, token_bytes = _DTYPES[code]
    size = path.stat().st_size
    index = Index(path, dtype, token_bytes, sequences, entries - 1, has_modes=False)
    if size == index._modes_at + _MODE * sequences and sequences:
        return Index(path, dtype, token_bytes, sequences, entries - 1, True)
    if size != index._modes_at:
        raise broken(
            path,
            f"it has {size} bytes; its header, of {sequences} sequences and {entries - 1} "
            f"documents, implies {index._modes_at}",
        )
    return index


def check_ends(index: Index, data_bytes: int) -> None:
    """Check the first and the last number of every list, which costs nothing.

    Raises:
        CppmegaError: `data-broken`.
    """
    if not index.sequences:
        return
    (first,) = _numbers(index, "<i8", index._pointers_at, 1)
    last_pointer = index._pointers_at + _POINTER * (index.sequences - 1)
    (pointer,) = _numbers(index, "<i8", last_pointer, 1)
    (length,) = _numbers(index, "<i4", _HEADER.size + _LENGTH * (index.sequences - 1), 1)
    if first != 0:
        raise broken(index.path, f"its first sequence begins at byte {first} of the data")
    end = int(pointer) + int(length) * index.token_bytes
    if end != data_bytes or length < 0:
        raise broken(
            index.path, f"its last sequence ends at byte {end}, and the data file has {data_bytes}"
        )
    (zero,) = _numbers(index, "<i8", index._documents_at, 1)
    (count,) = _numbers(index, "<i8", index._documents_at + _POINTER * index.documents, 1)
    if zero != 0 or count != index.sequences:
        raise broken(
            index.path,
            f"its documents cover the sequences {zero} to {count}, and there are {index.sequences}",
        )


def check_all(index: Index, data_bytes: int) -> None:
    """Check every length, pointer, document and mode.

    Raises:
        CppmegaError: `data-broken`, with the first number that is wrong.
    """
    _check_sequences(index, data_bytes)
    _check_documents(index)
    if index.has_modes:
        _check_modes(index)


def same_lengths(one: Index, other: Index) -> bool:
    """Whether two datasets have sequences of the same lengths in the same order.

    Raises:
        CppmegaError: `data-broken`, `data-not-readable`.
    """
    import numpy as np

    lists = (_parts(index, "<i4", _HEADER.size, index.sequences) for index in (one, other))
    return one.sequences == other.sequences and all(
        np.array_equal(own, others) for (_, own), (_, others) in zip(*lists, strict=True)
    )


def _check_sequences(index: Index, data_bytes: int) -> None:
    import numpy as np

    at = 0
    lists = zip(
        _parts(index, "<i4", _HEADER.size, index.sequences),
        _parts(index, "<i8", index._pointers_at, index.sequences),
        strict=True,
    )
    for (begin, lengths), (_, pointers) in lists:
        negative = np.flatnonzero(lengths < 0)
        if negative.size:
            which = int(negative[0])
            raise broken(index.path, f"sequence {begin + which} has {lengths[which]} tokens")
        ends = at + np.cumsum(lengths, dtype=np.int64) * index.token_bytes
        starts = np.concatenate(([at], ends[:-1]))
        other = np.flatnonzero(pointers != starts)
        if other.size:
            which = int(other[0])
            raise broken(
                index.path,
                f"sequence {begin + which} begins at byte {pointers[which]} of the data, and the "
                f"one before it ends at byte {starts[which]}",
            )
        at = int(ends[-1])
    if at != data_bytes:
        raise broken(
            index.path, f"its sequences end at byte {at}, and the data file has {data_bytes}"
        )


def _check_documents(index: Index) -> None:
    import numpy as np

    before = 0
    for begin, documents in _parts(index, "<i8", index._documents_at, index.documents + 1):
        starts = np.concatenate(([before], documents))
        falling = np.flatnonzero(starts[1:] < starts[:-1])
        if falling.size:
            which = int(falling[0])
            raise broken(
                index.path,
                f"document {begin + which} begins at sequence {documents[which]}, before the "
                f"previous one ({starts[which]})",
            )
        if begin == 0 and documents[0] != 0:
            raise broken(index.path, f"its first document begins at sequence {documents[0]}")
        before = int(documents[-1])
    if before != index.sequences:
        raise broken(
            index.path, f"its documents end at sequence {before}, and there are {index.sequences}"
        )


def _check_modes(index: Index) -> None:
    import numpy as np

    for begin, modes in _parts(index, "i1", index._modes_at, index.sequences):
        marked = np.flatnonzero(modes)
        if marked.size:
            which = int(marked[0])
            raise broken(
                index.path,
                f"it is multimodal: sequence {begin + which} has mode {modes[which]}",
            )


def _parts(
    index: Index, dtype: str, at: int, count: int
) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Read a list in pieces: the number of the first one in the piece, and the piece."""
    for begin in range(0, count, _AT_ONCE):
        size = int(dtype[-1])
        yield begin, _numbers(index, dtype, at + begin * size, min(_AT_ONCE, count - begin))


def _numbers(index: Index, dtype: str, at: int, count: int) -> np.ndarray[Any, Any]:
    """Read numbers; mapping them would turn a file that shrinks into a SIGBUS."""
    try:
        import numpy as np
    except ModuleNotFoundError:
        raise CppmegaError(
            "package-missing",
            f"The interpreter of this command, {sys.executable}, has no numpy.",
            f"{index.path} is read with it, as Megatron does.",
            "the same command with the interpreter that trains; or pip install numpy",
        ) from None

    with readable(index.path):
        numbers = np.fromfile(index.path, dtype=dtype, count=count, offset=at)
    if len(numbers) < count:
        raise broken(index.path, "it became shorter while it was read")
    return numbers


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an error of the file system while a file is read into one that names the file.

    Raises:
        CppmegaError: `data-not-readable`.
    """
    try:
        yield
    except OSError as error:
        raise CppmegaError(
            "data-not-readable",
            f"{path}: {error.strerror or error}.",
            "A rank would end when it reaches that place, hours into the run.",
            "check the owner and the mode of the file, and the file system it is on",
        ) from error


def broken(path: Path, what: str) -> CppmegaError:
    """The error of a dataset whose files contradict each other."""
    return CppmegaError(
        "data-broken",
        f"{path}: {what}.",
        "Samples would be cut at the wrong places, or end in a crash far into the run.",
        "prepare the data again, under another name",
    )
