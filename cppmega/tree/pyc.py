"""Check bytecode on disk: whether Python would use it, and whether its source compiles to it.

Python compares only the source's size and its time in seconds, or nothing at all if the bytecode is
marked as unchecked. The only proof is to compile the source, which takes a second for all of
Megatron, so bytecode that matched once is remembered by its hash in the user's cache folder.
"""

from __future__ import annotations

import importlib.util
import marshal
import sys
from pathlib import Path
from types import CodeType

from cppmega.host import own_files
from cppmega.tree.installed import sha256

HEADER = 16
_LEDGER = "bytecode-1"
_MOST = 20_000
"""The number of lines after which the ledger is started over."""


def trusted(data: bytes, source: Path, text: bytes) -> bool:
    """Whether Python would run bytecode instead of compiling the source.

    Args:
        data: the bytes of the `.pyc`.
        text: the bytes of the source.
    """
    if len(data) < HEADER or data[:4] != importlib.util.MAGIC_NUMBER:
        return False
    flags = int.from_bytes(data[4:8], "little")
    if flags & 1:  # hash-based; the hash is checked only if the second bit is set
        return not flags & 2 or data[8:HEADER] == importlib.util.source_hash(text)
    there = source.stat()
    return (int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little")) == (
        int(there.st_mtime) & 0xFFFFFFFF,
        there.st_size & 0xFFFFFFFF,
    )


def same(data: bytes, code: CodeType) -> bool:
    """Whether bytecode contains that code."""
    try:
        return bool(marshal.loads(data[HEADER:]) == code)
    except (EOFError, ValueError, TypeError):
        return False


def compiled(text: bytes, source: Path, optimize: int = -1) -> CodeType:
    """Compile a source; `optimize` is that of the built-in `compile`."""
    return compile(text, str(source), "exec", dont_inherit=True, optimize=optimize)


class Ledger:
    """Bytecode that was compared with its source and matches it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _LEDGER
        self._known = self._read()
        self._new: set[str] = set()

    def knows(self, data: bytes, text: bytes) -> bool:
        """Whether this bytecode was compared with this source before."""
        key = _key(data, text)
        return key in self._known or key in self._new

    def add(self, data: bytes, text: bytes) -> None:
        """Remember that this bytecode matches this source."""
        self._new.add(_key(data, text))

    def save(self) -> None:
        """Write the new entries; without a cache folder, the next process compares again."""
        if not self._new:
            return
        text = "".join(f"{key}\n" for key in sorted(self._new))
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a" if len(self._known) < _MOST else "w") as file:
                file.write(text)
        except OSError:
            return
        self._known |= self._new
        self._new.clear()

    def _read(self) -> set[str]:
        return set(own_files.read(self._file).decode(errors="replace").split())


def _key(data: bytes, text: bytes) -> str:
    """Hash a comparison without the header, which Python checks and a copied tree changes."""
    return sha256(f"{sys.flags.optimize} {sha256(data[HEADER:])} {sha256(text)}".encode())[:32]
