"""The environments of the declared range are built of whichever Python starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import stacks


def _program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_pyenvs_python_serves_where_its_shim_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(
        tmp_path / "shims" / "python9.9", "echo 'pyenv: python9.9: command not found'; exit 127"
    )
    starts = _program(tmp_path / "versions" / "9.9.1" / "bin" / "python", "echo 9.9")
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert stacks.interpreter("9.9") == starts
    assert stacks.interpreter("8.8") == "8.8", "left for uv, which may download it"
