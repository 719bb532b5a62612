"""Bytecode on disk: would Python take it for a source, and is it what the source compiles to?

Python compares a second and a size, and nothing at all where the bytecode says so. Only compiling
tells, which takes a second for all of Megatron: what was compared once is remembered by its hash,
in the user's cache folder.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import sys
from pathlib import Path
from types import CodeType

from cppmega.tree.installed import sha256

HEADER = 16
_LEDGER = "bytecode-1"
_MOST = 20_000
"""Lines of the ledger after which it starts anew."""


def trusted(data: bytes, source: Path, text: bytes) -> bool:
    """Whether Python would use bytecode without looking at the source's text.

    Args:
        data: the bytes of the `.pyc`.
        text: the bytes of the source.
    """
    if len(data) < HEADER or data[:4] != importlib.util.MAGIC_NUMBER:
        return False
    flags = int.from_bytes(data[4:8], "little")
    if flags & 1:  # by hash; it is only compared where the second bit says so
        return not flags & 2 or data[8:HEADER] == importlib.util.source_hash(text)
    there = source.stat()
    return (int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little")) == (
        int(there.st_mtime) & 0xFFFFFFFF,
        there.st_size & 0xFFFFFFFF,
    )


def same(data: bytes, code: CodeType) -> bool:
    """Whether bytecode holds that code."""
    try:
        return bool(marshal.loads(data[HEADER:]) == code)
    except (EOFError, ValueError, TypeError):
        return False


def compiled(text: bytes, source: Path, optimize: int = -1) -> CodeType:
    """What a source compiles to; `optimize` as `compile` takes it."""
    return compile(text, str(source), "exec", dont_inherit=True, optimize=optimize)


class Ledger:
    """Bytecode that was compared with its source and is the same."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _LEDGER
        self._known = self._read()
        self._new: set[str] = set()

    def knows(self, data: bytes, text: bytes) -> bool:
        """Whether this bytecode was compared with this source before."""
        key = _key(data, text)
        return key in self._known or key in self._new

    def add(self, data: bytes, text: bytes) -> None:
        """Remember a comparison."""
        self._new.add(_key(data, text))

    def save(self) -> None:
        """Keep what is new. Without a cache folder the next process compares again."""
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
        try:
            # What others may write in says nothing.
            if self._file.stat().st_uid != os.geteuid() or self._file.stat().st_mode & 0o022:
                return set()
            return set(self._file.read_text().split())
        except (OSError, ValueError):
            return set()


def _key(data: bytes, text: bytes) -> str:
    """The header is left out: Python compares it, and a copied tree has another one."""
    return sha256(f"{sys.flags.optimize} {sha256(data[HEADER:])} {sha256(text)}".encode())[:32]
