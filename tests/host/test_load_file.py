"""Pages are loaded by path: bytecode of another text, or of another place, is not run."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from cppmega.host import load_file


def loaded(path: Path) -> tuple[int, str]:
    """The value that a file assigns, and the file that its function names as its own."""
    made = load_file.load(
        "made_page", path, lambda what: CppmegaError("page-failed", what, "", ""), writes=True
    )
    return made.VALUE, made.where.__code__.co_filename


def test_bytecode_is_of_the_current_text_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    page = tmp_path / "one" / "page.py"
    page.parent.mkdir()
    page.write_text("VALUE = 1\ndef where(): ...\n")
    stamp = page.stat()
    assert loaded(page) == loaded(page) == (1, str(page))
    (cached,) = page.parent.glob("__pycache__/*.pyc")
    page.write_text(page.read_text().replace("1", "2"))
    os.utime(page, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as an edit can leave it
    assert loaded(page) == (2, str(page))
    shutil.copytree(page.parent, tmp_path / "two")
    assert loaded(tmp_path / "two" / "page.py") == (2, str(tmp_path / "two" / "page.py"))
    cached.write_bytes(cached.read_bytes()[:40])  # as a full disk leaves it
    assert loaded(page) == (2, str(page))
