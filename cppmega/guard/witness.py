"""The loader of the packages that pages may target, which remembers the bytes that it loaded.

A file that is read later may not be the one that was imported: it can be put back, and bytecode can
remove itself. The loader is Python's own, except that it runs no bytecode of a different source.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from cppmega.guard.copied_names import PACKAGES
from cppmega.tree import pyc, wheels
from cppmega.tree.installed import sha256


class Witnessed(SourceFileLoader):
    """Python's source loader, with the hash of the source and the bytecode that it rejected."""

    loaded: str = ""
    """SHA-256 of the source that was loaded; empty before that."""
    foreign: str = ""
    """The path of bytecode that Python would have used although it does not match the source."""

    def get_code(self, fullname: str) -> CodeType | None:
        path = Path(self.get_filename(fullname))
        text, cached = path.read_bytes(), _cached(path)
        data = _bytes(cached)
        self.loaded = sha256(text)
        self._held = {str(path): text, str(cached): data}
        known = _LEDGER.knows(data, text)
        try:
            if known or not pyc.trusted(data, path, text):
                code = super().get_code(fullname)
            else:
                code = self.source_to_code(text, str(path))
                self.foreign = "" if pyc.same(data, code) else str(cached)
        finally:
            self._held = {}
        if code is not None and not self.foreign and not known:
            _compared(_bytes(cached), text, code)
        return code

    def get_data(self, path: str) -> bytes:
        """The bytes of a file as they were when it was judged."""
        held = getattr(self, "_held", {}).get(path)
        return held if held else super().get_data(path)


class _Finder(MetaPathFinder):
    """First on `sys.meta_path`; replaces Python's source loader in the specs that others find."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        for finder in sys.meta_path:
            found = getattr(finder, "find_spec", None)  # some old finders have none
            spec: ModuleSpec | None = None
            if found is not None and finder is not self:
                spec = found(fullname, path, target)
            if spec is not None:
                if type(spec.loader) is SourceFileLoader:
                    spec.loader = Witnessed(spec.loader.name, spec.loader.path)
                return spec
        return None


_FINDER = _Finder()
_LEDGER = pyc.Ledger(wheels.cache())


def install() -> None:
    """Load every targeted package with this loader from now on."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def foreign_bytecode(path: Path, text: bytes) -> str:
    """The path of the bytecode that Python used for a source, if the two do not match."""
    cached = _cached(path)
    data = _bytes(cached)
    if not pyc.trusted(data, path, text) or _LEDGER.knows(data, text):
        return ""
    return "" if _compared(data, text, pyc.compiled(text, path)) else str(cached)


def remember() -> None:
    """Save the comparisons for the next process."""
    _LEDGER.save()


def _compared(data: bytes, text: bytes, code: CodeType) -> bool:
    """Whether bytecode holds this code; if so, the comparison is remembered."""
    if not pyc.same(data, code):
        return False
    _LEDGER.add(data, text)
    return True


def _cached(path: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(path)))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
