"""The CPU smoke run on the real megatron-core: stock against patched, kill and resume."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from cppmega.overlay import verbs as overlay
from cppmega.overlay.verbs import Session
from tests import forkserver
from tests.support import REPOSITORY, copy, pristine, python

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

STEPS = 4


Curve = list[dict[str, float]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def train(root: Path, out: Path, data: Path, steps: int = STEPS, guarded: bool = True) -> Curve:
    """Run the smoke training on one tree; the curve."""
    script = str(REPOSITORY / "scripts" / "smoke.py")
    arguments = ["train", "--out", str(out), "--data", str(data), "--steps", str(steps)]
    executable = forkserver.executable()
    command = [executable, "-m", "cppmega.run", "--megatron", str(root), script, *arguments]
    if not guarded:
        only = "from pathlib import Path; from cppmega.guard import files\n"
        only += "from examples.smoke import command\n"
        only += f"files.only_from(Path({str(root)!r}))\n"
        only += f"out, data = Path({str(out)!r}), Path({str(data)!r})\n"
        only += f"command.run(command.recipe(), out, data, {steps}, unguarded=True)"
        command = [executable, "-c", only]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CPPMEGA_")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    curve: Curve = json.loads((out / "curve.json").read_text())
    return curve


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def stock(runs: Path, data: Path) -> Curve:
    return train(pristine("0.19.2"), runs / "stock", data, guarded=False)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.19.2 with every page that needs no switch."""
    root = copy("0.19.2", tmp_path_factory.mktemp("tree") / "tree")
    assert overlay.apply(Session(root), environment={}).ok
    return root


@pytest.fixture(scope="module")
def patched(runs: Path, everything: Path, data: Path) -> Curve:
    return train(everything, runs / "patched", data)


def test_stock_trains_on_wrong_mtp_labels_and_the_overlay_does_not(
    stock: Curve, patched: Curve
) -> None:
    assert all(row["wrong"] > 0.3 * row["labels"] for row in stock)
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
    everything: Path, patched: Curve, data: Path, tmp_path: Path
) -> None:
    train(everything, tmp_path / "parts", data, steps=STEPS // 2)
    assert train(everything, tmp_path / "parts", data) == patched


def test_runs_are_scored_on_the_same_labels_and_grouped_by_overlay(
    stock: Curve, patched: Curve, runs: Path, everything: Path, data: Path, tmp_path: Path
) -> None:
    folders = [str(runs / "stock"), str(runs / "patched"), str(runs / "patched")]
    words = ["compare", "--data", str(data), "--packs", "2", "--out", str(tmp_path), *folders]
    done = python(everything, f"from examples.smoke import command; command.cli({words!r})")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "curves.png").stat().st_size > 1000
    rows = json.loads((tmp_path / "comparison.json").read_text())
    assert rows["stock"]["overlay"] == "stock" != rows["patched"]["overlay"]
    for name, curve in (("stock", stock), ("patched", patched)):
        assert rows[name]["wrong_mtp_labels"] == sum(row["wrong"] for row in curve)
        assert all(4 < loss < 6 for loss in rows[name]["true_mtp_loss"]), "ln 257 is 5.5"
    assert rows["stock"]["true_mtp_loss"] != rows["patched"]["true_mtp_loss"]


LOOP = """
import json, math, os
from pathlib import Path
from types import SimpleNamespace
import torch
from cppmega.overlay import record as overlay_record
from cppmega.recipe.index import load
from examples.smoke import loop as smoke_loop, model as smoke_model
from cppmega.errors import CppmegaError
from cppmega.training.own_loop import recipe_of_rank
from examples.smoke.loop import Loop

out, folder, data = {}, Path(os.environ["FOLDER"]), Path(os.environ["DATA"])
recipe = load('smoke_cpu').with_(num_layers=2, mtp_num_layers=1)
build = smoke_model.with_optimizer


def named(call):
    try:
        return call()
    except CppmegaError as error:
        return error.name + ": " + error.what


def poisoned(spoil):
    def made(plan):
        model, ddp, optimizer = build(plan)
        spoil(model)
        return model, ddp, optimizer
    return made


def run(name, spoil=lambda model: None, recipe=recipe, **more):
    smoke_model.with_optimizer = poisoned(spoil)
    loop = Loop(data=data, save=folder / name, metrics=folder / f"{name}.jsonl",
                unguarded=True, **more)
    return named(lambda: len(smoke_loop.run(recipe, loop).curve))


def forward(model):
    model.decoder.layers[1].register_forward_hook(lambda m, i, o: (o[0] * math.nan, *o[1:]))


def backward(model):
    def hook(m, i, o):
        o[0].register_hook(lambda gradient: gradient * math.inf)
    model.decoder.layers[0].register_forward_hook(hook)


def biased(model):
    model.output_layer.register_forward_hook(lambda m, i, o: (o[0] * 200, *o[1:]))


out["loss"] = run("loss", forward, steps=2)
out["gradient"] = run("gradient", backward, steps=2)
out["first loss"] = run("first", biased, steps=2)
out["kept"] = [p.name for p in (folder / "loss").glob("*")]
out["again"] = run("whole", steps=3, save_interval=2, exit_interval=2)
(folder / "whole" / "iter_0000003.unfinished").mkdir()  # of a run that was killed while saving
other = overlay_record.OverlayRecord(
    digest="another", pages={"x": overlay_record.PageRecord("1", "t")})
smoke_loop._record = lambda: other
print("SAID", flush=True)
out["on"] = run("whole", steps=3, load=folder / "whole")
print("THAT", flush=True)
out["done"] = run("whole", steps=3, load=folder / "whole")
out["folder"] = sorted(p.name for p in (folder / "whole").iterdir())
rows = [json.loads(line) for line in (folder / "whole.jsonl").read_text().splitlines()]
out["steps"] = [row.get("step") for row in rows]
share = recipe_of_rank(recipe, 2).micro_batch_size
out["shares"] = [share, named(lambda: recipe_of_rank(recipe, 3))]
bounds = torch.tensor([0, 16, 24, 64])
params = SimpleNamespace(cu_seqlens_q=None, cu_seqlens_q_padded=bounds)
attention = smoke_model.DocumentAttention(SimpleNamespace(kv_channels=8), 1, None, "self")
q, k, v = torch.randn(3, 64, 2, 8)
scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
document = torch.bucketize(torch.arange(64), bounds[1:], right=True)
seen = (document[:, None] == document) & torch.ones(64, 64).tril().bool()
weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
wanted = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
found = attention(q, k, v, None, packed_seq_params=params)
out["attention"] = float((found - wanted).abs().max())
print("ANSWER" + json.dumps(out))
"""


def test_a_loop_that_is_lost_says_where_and_nothing_saved_is_lost(
    data: Path, tmp_path: Path
) -> None:
    places = {"FOLDER": str(tmp_path), "DATA": str(data)}
    done = python(pristine("0.19.2"), LOOP, env=places)
    assert "ANSWER" in done.stdout, done.stderr[-3000:]
    out = json.loads(done.stdout.partition("ANSWER")[2])
    assert out["loss"].startswith("step-not-finite: The loss is NaN: decoder.layers.1 is the first")
    assert out["gradient"].startswith("step-not-finite")
    assert "the gradient of decoder.layers.0." in out["gradient"]
    assert out["first loss"].startswith("first-loss-implausible")
    assert out["kept"] == []  # no checkpoint of lost weights
    assert (out["again"], out["on"]) == (2, 1)  # ended by the exit interval, then resumed
    assert out["done"].startswith("already-trained")
    tracker = "latest_checkpointed_iteration.txt"
    finished = ["iter_0000002", "iter_0000003", "iter_0000003.unfinished.1", tracker]
    assert out["folder"] == finished
    assert out["steps"] == [None, 1, 2, None, 3, None]
    said = done.stdout.partition("SAID")[2].partition("THAT")[0]
    assert "saved under overlay none, this run has another: patch added: x" in said
    assert out["attention"] < 1e-6, "documents are attended to one by one"
    assert out["shares"][0] == 4 and out["shares"][1].startswith("wrong-world-size")
