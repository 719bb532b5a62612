"""Load pages and recipes by path, and supervise their execution."""

from __future__ import annotations

import contextlib
import importlib.util
import marshal
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path
from types import CodeType, ModuleType

from cppmega.host.containment import Failed, contained

_CHECKED_HASH = (0b11).to_bytes(4, "little")
"""Flags of bytecode that Python compares with its source by hash."""


class _FromSource(SourceFileLoader):
    """Compile the current text of a file, with docstrings and assertions even under `python -OO`.

    They are a page's header and its proof. Bytecode is used only if it holds the hash of the text:
    Python also uses it if the source's size and its time in seconds agree, and an edit can keep
    both. Compiling all pages takes as long as the rest of a guarded start, so theirs is written.
    """

    def __init__(self, name: str, path: str, *, writes: bool) -> None:
        super().__init__(name, path)
        self.writes = writes and not sys.dont_write_bytecode

    def get_code(self, fullname: str) -> CodeType:
        text, cached = self.get_data(self.path), cache_from_source(self.path, optimization="")
        head = MAGIC_NUMBER + _CHECKED_HASH + source_hash(text)
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
            held = self.get_data(cached)
            if held.startswith(head):
                code: CodeType = marshal.loads(memoryview(held)[len(head) :])
                if code.co_filename == self.path:
                    return code
        code = self.source_to_code(text, self.path, _optimize=0)
        if self.writes:
            self.set_data(cached, head + marshal.dumps(code))
        return code


class _SiblingFinder(MetaPathFinder):
    """Find modules that a file imports from its own folder, and run them from source as well."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module in one of the registered folders only."""
        if path is None or fullname.partition(".")[0] not in self.packages:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and spec.loader is not None:
            spec.loader = _FromSource(spec.name, spec.origin, writes=True)
        return spec


_SIBLINGS = _SiblingFinder()


def package(name: str, folder: Path) -> None:
    """Register a folder as a package, so that its files can import the modules next to them.

    Shared modules, whose names begin with `_`, are loaded again, since they may have been edited.
    """
    if _SIBLINGS not in sys.meta_path:
        sys.meta_path.insert(0, _SIBLINGS)
    if name not in _SIBLINGS.packages:
        _SIBLINGS.packages.add(name)
        sys.modules[name] = module = ModuleType(name)
        module.__path__ = [str(folder)]
    _forget(f"{name}._")


def load(
    name: str,
    path: Path,
    failed: Failed,
    below: Sequence[str] | None = None,
    *,
    writes: bool = False,
) -> ModuleType:
    """Execute a file as a module of that name, which stays in `sys.modules`.

    Args:
        failed: builds the error from what the file raised or did.
        below: where its submodules are, if it is the `__init__` of a package.
        writes: whether its bytecode is kept next to it.

    Raises:
        CppmegaError: raised by the file, or built by `failed`.
    """
    spec = importlib.util.spec_from_file_location(
        name,
        path,
        loader=_FromSource(name, str(path), writes=writes),
        submodule_search_locations=None if below is None else list(below),
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _forget(f"{name}.")
    with contained(failed):
        spec.loader.exec_module(module)
    return module


def _forget(beginning: str) -> None:
    if beginning not in "\n".join(sys.modules):  # sooner known than by asking thousands of names
        return
    for name in [name for name in sys.modules if name.startswith(beginning)]:
        del sys.modules[name]
