"""The CPU smoke run on the real megatron-core: stock against patched, kill and resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cppmega import overlay
from cppmega.overlay import Session
from tests.support import REPOSITORY, copy, pristine

pytestmark = pytest.mark.megatron

STEPS = 4


Curve = list[dict[str, float]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def train(root: Path, out: Path, data: Path, steps: int = STEPS, guarded: bool = True) -> Curve:
    """Run the smoke training on one tree; the curve."""
    script = str(REPOSITORY / "scripts" / "smoke.py")
    arguments = ["train", "--out", str(out), "--data", str(data), "--steps", str(steps)]
    command = [sys.executable, "-m", "cppmega.run", "--megatron", str(root), script, *arguments]
    if not guarded:
        only = "import sys; from pathlib import Path; from cppmega import imported, smoke;\n"
        only += f"imported.only_from(Path({str(root)!r})); smoke.cli({arguments!r})"
        command = [sys.executable, "-c", only]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CPPMEGA_")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    curve: Curve = json.loads((out / "curve.json").read_text())
    return curve


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Curve:
    out = tmp_path_factory.mktemp("stock") / "run"
    return train(pristine("0.19.2"), out, data, guarded=False)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.19.2 with every page that needs no switch."""
    root = copy("0.19.2", tmp_path_factory.mktemp("tree") / "tree")
    assert overlay.apply(Session(root), environment={}).ok
    return root


def test_stock_trains_on_wrong_mtp_labels_and_the_overlay_does_not(
    stock: Curve, everything: Path, data: Path, tmp_path: Path
) -> None:
    patched = train(everything, tmp_path / "run", data)
    assert all(row["wrong"] > 0 for row in stock)
    assert all(row["wrong"] == 0 for row in patched)
    assert patched[0]["loss"] == stock[0]["loss"], "the first main loss does not depend on MTP"
    assert patched[-1]["mtp"] != stock[-1]["mtp"]


def test_pages_that_say_bitwise_train_like_stock_to_the_bit(
    stock: Curve, data: Path, tmp_path: Path
) -> None:
    root = copy("0.19.2", tmp_path / "tree")
    session = Session(root)
    exact = [n for n, p in session.pages.items() if p.labels["Numerics"].startswith("none")]
    needed = {v.name for v in overlay.status(session).verdicts if v.state == "pending"}
    chosen = [name for name in exact if name in needed]
    assert chosen and overlay.apply(session, only=chosen, environment={}).ok
    assert train(root, tmp_path / "run", data) == stock


def test_a_run_resumed_from_its_checkpoint_goes_on_with_the_same_curve(
    everything: Path, data: Path, tmp_path: Path
) -> None:
    whole = train(everything, tmp_path / "whole", data)
    train(everything, tmp_path / "parts", data, steps=STEPS // 2)
    assert train(everything, tmp_path / "parts", data) == whole
