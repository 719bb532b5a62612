"""For tests of the overlay on one small tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lab import Lab


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)
