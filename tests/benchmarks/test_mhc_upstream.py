"""The comparison of checkpoints with upstream's branches: what it finds, and what it unpacks."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import patched, python

upstream = importlib.import_module("benchmarks.mhc_upstream")

GRADIENTS = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([1e-6])}
STEP = {"loss": 4.0, "gradients": GRADIENTS}
TREE = {"parameters": {"a": (2,), "b": (1,)}, "saved": {"a": (2,), "b": (1,)}, **STEP}


def with_gradient(name: str, value: float) -> dict[str, Any]:
    """A step of which one gradient is another."""
    return {"loss": 4.0, "gradients": {**GRADIENTS, name: GRADIENTS[name] + value}}


@pytest.mark.parametrize(
    ("theirs", "theirs_loaded", "same"),
    [
        (TREE, STEP, True),
        (TREE, with_gradient("b", 1e-7), True),  # next to nothing is left of the sum
        (TREE, with_gradient("b", 1e-5), False),
        (TREE, with_gradient("a", 1e-3), False),
        (TREE, with_gradient("a", float("nan")), False),
        (TREE, {"loss": 4.1, "gradients": GRADIENTS}, False),
        (TREE, {"loss": 4.0, "gradients": {"a": GRADIENTS["a"]}}, False),
        ({**TREE, "parameters": {"a": (2,)}}, STEP, False),
        ({**TREE, "saved": {"a": (2,), "b": (2,)}}, STEP, False),
    ],
)
def test_every_difference_is_one(
    theirs: dict[str, Any], theirs_loaded: dict[str, Any], same: bool
) -> None:
    found = upstream.compared(TREE, theirs, STEP, theirs_loaded)
    assert upstream.is_same(found) is same
    tree = {"ref": "main", "commit": "0" * 40, "of": "2026-01-01", "models": {"GPT": found}}
    report = {"date": "", "torch": "", "trees": [tree]}
    (row,) = (line for line in upstream.table(report).splitlines() if line.startswith("| main"))
    assert ("**no**" in row) is not same


def test_a_commit_is_unpacked_and_named(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    (clone / "megatron").mkdir(parents=True)
    (clone / "megatron" / "a.py").write_text("a = 1\n")
    (clone / "tests.py").write_text("")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(clone)]
    subprocess.run(["git", "init", "-q", "-b", "main", str(clone)], check=True)
    for words in (("add", "."), ("commit", "-qm", "first")):
        subprocess.run([*git, *words], check=True)
    (clone / "megatron" / "a.py").write_text("a = 2\n")  # not part of the commit
    found = upstream.unpacked(clone, "main", tmp_path / "tree")
    assert found["ref"] == "main" and len(found["commit"]) == 40
    assert (tmp_path / "tree" / "megatron" / "a.py").read_text() == "a = 1\n"
    assert not (tmp_path / "tree" / "tests.py").exists()


@pytest.mark.slow
def test_a_tree_loads_its_own_checkpoint_and_repeats_the_step(tmp_path: Path) -> None:
    code = f"""
    from benchmarks import mhc_upstream_worker as w

    w.CASES = {{name: w.CASES[name] for name in ("GPT", "hybrid M*-E")}}
    w.main({str(tmp_path)!r}, "")
    w.main({str(tmp_path)!r}, {str(tmp_path)!r})
    """
    done = python(patched(upstream.VERSION, *upstream.PAGES), code)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("GPT", "hybrid M*-E"):
        own, loaded = (torch.load(tmp_path / f"{name}{end}.pt") for end in ("", "-loaded"))
        found = upstream.compared(own, own, loaded, loaded)
        assert upstream.is_same(found) and found["losses apart"] == 0, name
        assert found["parameters"] > 40 and found["saved"] > 30
