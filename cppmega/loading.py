"""Python files loaded by their path: pages and recipes, executed under watch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from cppmega.containment import Failed, contained


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
    with contained(failed):
        spec.loader.exec_module(module)
    return module
