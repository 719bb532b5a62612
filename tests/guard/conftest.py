"""For tests that import a small Megatron as a rank would."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cppmega.guard import expected, files, import_hook, imports
from cppmega.tree import pyc
from tests.guard.sites import FILES, Site
from tests.support.made import dist_info


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A tree with a RECORD; what this process imports of it is forgotten afterwards."""
    made = Site(tmp_path / "site")
    for path, data in FILES.items():
        made.write(path, data)
    dist_info(made.root, "0.19.2")
    monkeypatch.setattr(expected, "_LEDGER", pyc.Ledger(tmp_path / "cache"))
    monkeypatch.setattr(imports, "WATCHED", imports.Watched())
    monkeypatch.setattr(import_hook, "_HOOKS", [])
    monkeypatch.setattr(files, "_SOUND", {})
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    names = [name for name in sys.modules if name.partition(".")[0] in imports.PACKAGES]
    others = {name: sys.modules.pop(name) for name in names}
    yield made
    for name in [n for n in sys.modules if n.partition(".")[0] in imports.PACKAGES]:
        del sys.modules[name]
    sys.modules.update(others)
