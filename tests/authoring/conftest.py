"""For tests that write pages and pins."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.tree import wheels
from tests import forkserver


@pytest.fixture
def catalogue_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalogue of its own, no wheels, and proofs in forks."""
    forkserver.prove_in_forks(monkeypatch)
    folder = tmp_path / "pages"
    folder.mkdir()
    monkeypatch.setattr(catalogue, "builtin_folder", lambda: folder)

    def none(version: str, say: object, distribution: str) -> Path:
        raise CppmegaError("no-wheel", "none", "none", "none")

    monkeypatch.setattr(wheels, "unpacked", none)
    return folder
