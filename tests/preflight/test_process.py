"""Preflight in a process of its own: runtime patches in place, proofs that pass, the right tree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.preflight.contexts import SMOKE, holds, launch, refuses
from tests.support import PATIENCE, REPOSITORY, environment, patched, pristine
from tests.support.lab import Lab

pytestmark = pytest.mark.slow

WORKER = """
import sys
from pathlib import Path
from cppmega.catalogue import loader as catalogue
catalogue.builtin_folder = lambda: Path(sys.argv[1])
from cppmega.preflight.workers.rank import main
main()
"""
SWAP = """
def swap(original):
    def single(x):
        return 2 * original(x)
    return single
"""


def ask(lab: Lab) -> list[dict[str, str]]:
    """What the process finds on a made tree; only its catalogue is not ours."""
    order = {"root": str(lab.root), "expected": str(lab.root), "argv": None, "world": None}
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(lab.pages)],
        input=json.dumps(order),
        env=lab.environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    found: list[dict[str, str]] = json.loads(done.stdout)["problems"]
    return found


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A made tree with a runtime patch of `single`."""
    lab = Lab(tmp_path, monkeypatch)
    edit = {"kind": '"function-swap"'}
    lab.page("swap", "megatron/core/b.py:single", "swap", code=SWAP, more=edit)
    return lab


def applied(lab: Lab, **files: str) -> Lab:
    """The tree with further modules in it, and every page applied."""
    for name, text in files.items():
        lab.files[f"megatron/core/{name}.py"] = text.encode()
    lab.wheel()
    assert lab.apply().ok
    return lab


def test_a_runtime_patch_that_is_in_place(lab: Lab) -> None:
    assert ask(applied(lab)) == []


def test_a_stale_copy_of_a_replaced_name(lab: Lab) -> None:
    # The package's own start copies the name before anybody can replace it.
    lab.files["megatron/core/b.py"] += b"\n\nCOPIES = {'single': single}\n"
    lab.page(
        "swap", "megatron/core/b.py:single", "swap", code=SWAP, more={"kind": "'function-swap'"}
    )
    assert "stale-reference" in str(ask(applied(lab)))


def test_a_patch_that_somebody_takes_out_again(lab: Lab) -> None:
    lab.page("late", "megatron/core/late.py:here", 'replacing("1", "2")', pins={"1.0": "0" * 16})
    late = "import megatron.core.b as b\nb.single = lambda x: x\n\n\ndef here():\n    return 1\n"
    lab.files["megatron/core/late.py"] = late.encode()
    lab.page("late", "megatron/core/late.py:here", 'replacing("1", "2")')
    assert [found["name"] for found in ask(applied(lab))] == ["patch-undone"]


def test_a_module_that_cannot_be_imported(lab: Lab) -> None:
    lab.files["megatron/core/a.py"] = (
        b"import no_such_package\n\n" + lab.files["megatron/core/a.py"]
    )
    lab.page()
    (found,) = ask(applied(lab))
    assert found["name"] == "import-failed" and "no_such_package" in found["what"]


def test_a_patched_file_that_python_does_not_import(lab: Lab) -> None:
    # A package of the name of the module takes its place.
    applied(lab)
    (lab.root / "megatron" / "core" / "b").mkdir()
    (lab.root / "megatron" / "core" / "b" / "__init__.py").write_text("def single(x): return x\n")
    assert [found["name"] for found in ask(lab)] == ["other-file"]


def test_another_tree_than_the_checked_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first" / "megatron" / "core").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(patched("0.19.2")))
    context = launch(SMOKE, environ={"PYTHONPATH": f"{REPOSITORY}:{tmp_path / 'first'}"})
    context.__dict__["session"] = launch(root=patched("0.19.2")).session
    found = refuses("imported_process", "several-megatrons", context)
    assert str(tmp_path / "first") in found.what


def test_a_process_that_ends_is_said_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nsys.stderr.write('gone\\n')\nos._exit(3)"
    )
    context = launch(root=patched("0.19.2"), environ={"PYTHONPATH": str(tmp_path)})
    found = refuses("imported_process", "process-ended", context)
    assert "status 3: gone" in found.what


def test_live_proofs(lab: Lab) -> None:
    proof = """
def verify():
    from megatron.core.a import double
    assert double(2) == 4, double(2)
"""
    page = lab.page(edit='replacing("x + x", "x + x + 1")')
    page.write_text(page.read_text().partition("def verify")[0] + proof)
    (lab.pages / "swap.py").unlink()
    applied(lab)
    found = refuses("proofs", "proof-failed", launch(root=lab.root))
    assert "AssertionError: 5" in found.what
    assert found.next == f"cppmega verify --megatron {lab.root} page"
    page.write_text(page.read_text().replace("x + x + 1", "2 * x"))
    assert lab.apply().ok
    assert "1 proofs pass on " in holds("proofs", launch(root=lab.root))


def test_proofs_that_this_machine_cannot_run(lab: Lab) -> None:
    (lab.pages / "swap.py").unlink()
    lab.page(needs=("no_such_package",))
    found = holds("proofs", launch(root=applied(lab).root))
    assert found.startswith("0 proofs pass on the code") and "proved 0 of 1 applied" in found


def preflight(root: Path) -> tuple[int, dict[str, Any], str]:
    """The command as a process, about a tree that the tests share: it writes nothing."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "cppmega",
            "preflight",
            "smoke_cpu",
            "--megatron",
            str(root),
            "--json",
        ],
        env=environment(root),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.megatron
def test_a_healthy_tree_passes_every_check_and_a_run_of_it_may_start() -> None:
    status, answer, said = preflight(patched("0.19.2"))
    states = {found["check"]: found["state"] for found in answer["checks"]}
    assert status == 0 and answer["ok"], answer
    assert states["imported_process"] == states["proofs"] == "ok"
    assert states["gpus"] == states["line_parses"] == "not-applicable"
    assert answer["digest"] and answer["megatron"]["version"] == "0.19.2"
    assert "preflight: " not in said


def test_a_tree_without_patches_stops_before_anything_is_imported() -> None:
    status, answer, _ = preflight(pristine("0.19.2"))
    states = {found["check"]: found["state"] for found in answer["checks"]}
    assert status == 1 and not answer["ok"]
    assert states["receipt_whole"] == "failed"
    assert states["imported_process"] == states["proofs"] == "not-run"
