"""Python files loaded by their path: pages and recipes, executed under watch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from cppmega.loading.containment import Failed, contained


class FromSource(SourceFileLoader):
    """Compiles what the file holds now.

    Python takes bytecode for its source's if second and size agree, and an edit can keep both: the
    page would have a new revision and do what the old one did.
    """

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


class _Whole(FromSource):
    """Leaves out neither a docstring nor an assertion, as `python -OO` would.

    They are a page's header and its proof.
    """

    def get_code(self, fullname: str) -> CodeType:
        data = self.get_data(self.path)
        code: CodeType = compile(data, self.path, "exec", dont_inherit=True, optimize=0)
        return code


class _Beside(MetaPathFinder):
    """Finds what a file imports from its own folder, which is executed from its source as well."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of a module in one of the folders, and of no other."""
        if path is None or fullname.partition(".")[0] not in self.packages:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and spec.loader is not None:
            spec.loader = _Whole(spec.name, spec.origin)
        return spec


_BESIDE = _Beside()


def package(name: str, folder: Path) -> None:
    """Let the files of a folder import modules beside them, as those of a package of that name.

    What they share, in modules that begin with `_`, is read again: it may have been edited since.
    """
    if _BESIDE not in sys.meta_path:
        sys.meta_path.insert(0, _BESIDE)
    if name not in _BESIDE.packages:
        _BESIDE.packages.add(name)
        sys.modules[name] = module = ModuleType(name)
        module.__path__ = [str(folder)]
    _forget(f"{name}._")


def load(name: str, path: Path, failed: Failed, below: Sequence[str] | None = None) -> ModuleType:
    """Execute a file as a module of that name, which stays in `sys.modules`.

    Args:
        failed: makes the error of what the file raised or did.
        below: where its submodules are, if it is the `__init__` of a package.

    Raises:
        CppmegaError: one that the file raises, or that of `failed`.
    """
    spec = importlib.util.spec_from_file_location(
        name,
        path,
        loader=_Whole(name, str(path)),
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
    for name in [name for name in sys.modules if name.startswith(beginning)]:
        del sys.modules[name]
