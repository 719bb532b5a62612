"""Commands that need torch refuse where there is none, and name the interpreter that has it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from cppmega.errors import CppmegaError
from cppmega.host import interpreter
from cppmega.tree.installed import find_root

OURS = f"python{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with an interpreter; this process has no torch."""
    monkeypatch.setattr(interpreter, "folder_of", lambda name: None)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    return tmp_path


def site(environment: Path, python: str) -> Path:
    return environment / "lib" / python / "site-packages"


def refused(root: Path, *, or_below: bool = False) -> str:
    with pytest.raises(CppmegaError) as error:
        interpreter.require_torch(root, "cppmega verify", or_below=or_below)
    assert error.value.name == "package-missing" and sys.executable in error.value.what
    return error.value.next


def test_it_names_the_interpreter_of_the_tree(environment: Path) -> None:
    python = environment / "bin" / "python"
    assert refused(site(environment, OURS)).startswith(f"{python} -m cppmega verify, after cppmega")
    (site(environment, OURS) / "cppmega-0.1.0.dist-info").mkdir(parents=True)
    assert refused(site(environment, OURS)) == f"{python} -m cppmega verify"


def test_a_tree_of_no_environment_has_none(environment: Path) -> None:
    assert refused(environment / "unpacked").startswith("PYTHON -m cppmega verify, where PYTHON")
    (environment / "bin" / "python").unlink()
    assert refused(site(environment, OURS)).startswith("PYTHON -m cppmega verify")


def test_the_environment_of_the_tree_may_be_this_one(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(environment))
    python = environment / "bin" / "python"
    assert refused(site(environment, OURS)) == f"{python} -m pip install torch"


def test_torch_next_to_megatron_counts_where_it_is_imported(environment: Path) -> None:
    for root in (site(environment, OURS), site(environment, "python3.1"), environment / "unpacked"):
        (root / "torch").mkdir(parents=True)
        (root / "torch" / "__init__.py").touch()
        refused(root)
    interpreter.require_torch(site(environment, OURS), "cppmega preflight", or_below=True)
    interpreter.require_torch(environment / "unpacked", "cppmega preflight", or_below=True)
    refused(site(environment, "python3.1"), or_below=True)


def test_the_environment_of_the_shell_is_offered_where_it_has_a_megatron(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool of its own finds none; the active environment is the one that trains."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("VIRTUAL_ENV", str(environment))
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    with pytest.raises(CppmegaError, match="no-megatron") as error:
        find_root()
    assert error.value.next.startswith("pip install megatron-core")
    (site(environment, "python3.12") / "megatron" / "core").mkdir(parents=True)
    with pytest.raises(CppmegaError) as error:
        find_root()
    assert error.value.next == f"the same command with --megatron {site(environment, 'python3.12')}"
    monkeypatch.setattr(sys, "prefix", str(environment))
    assert list(interpreter.activated()) == []


def test_an_interpreter_with_torch_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "folder_of", lambda name: tmp_path / name)
    interpreter.require_torch(tmp_path, "cppmega verify")
