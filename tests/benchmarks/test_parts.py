"""The comparison of NAM56R's parts: which runs there are, what they show, and meaningless ids."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from cppmega.data import corpus, record, structure_files, tokenizers
from cppmega.data.prepare import prepare
from cppmega.recipe import index as recipes_index
from cppmega.recipe.run_options import RunOptions
from cppmega.training.options import read

runs = importlib.import_module("benchmarks.harness.runs")
parts = importlib.import_module("benchmarks.whole.parts")

EFFECT = {"no_ngram": 0.1, "shuffled": -0.1}
"""What the stand-in for the trainer adds to a variant's losses; each seed adds as much to all."""
TRAINER = """
import json, sys
metrics, offset = sys.argv[1], float(sys.argv[2])
with open(metrics, "a") as file:
    for row in (
        {"start": "nam56r_small_cut", "overlay": "abc", "mock_data": False},
        *({"evaluated": step, "mock_data": False, "losses": {
            "lm loss": 9 - step / 100 + offset, "mtp_1 loss": 9.5 + offset, "mtp_2 loss": 9.7,
        }} for step in (50, 100)),
    ):
        print(json.dumps(row), file=file)
"""
STACK = {"torch": "2.11.0", "gpu": "NVIDIA H200"}


class Bench(runs.Bench):  # type: ignore[misc, name-defined]
    """Runs a stand-in for the trainer, and keeps the options that it was started with."""

    started: dict[str, RunOptions]

    def tree(self, name: str) -> Path:
        return Path(self.work / name)

    def start(self, name: str, tree: Path, *options: str) -> subprocess.Popen[bytes]:
        words = [self.recipe.name, "--data", str(self.data)]
        words += [word for change in self.changes for word in ("--set", change)]
        type(self).started[name], _ = read([*words, *options])
        variant, _, seed = name.rpartition("-")
        noise = {"m_for_r": 0.01 * (int(seed) - 2)}.get(variant, 0.0)
        offset = str(EFFECT.get(variant, noise) + 0.05 * int(seed))
        command = [sys.executable, "-IS", "-c", TRAINER, str(self.metrics(name)), offset]
        return subprocess.Popen(command)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line; what it would train on and with is replaced."""
    Bench.started = {}
    monkeypatch.setattr(parts, "Bench", Bench)
    monkeypatch.setattr(parts, "shuffled", lambda prefix, to, seed: to)
    data = {"fingerprint": "0", "documents": 1, "tokens": 2}
    header = {"recipe": parts.RECIPE, "date": "2026-11-24", "stack": STACK, "data": data}
    monkeypatch.setattr(runs, "header", lambda bench: header)
    places = {name: str(tmp_path / name) for name in ("site", "work", "out", "data", "held-out")}
    return [word for name, place in places.items() for word in (f"--{name}", place)]


def test_every_variant_trains_from_every_seed_on_the_same_samples(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parts.main([*asked, "--jobs", "2"], standalone_mode=False)
    assert end.value.code == 0
    assert len(Bench.started) == 3 * len(parts.VARIANTS)
    for name, options in Bench.started.items():
        assert f"seed={name[-1]}" in options.changes
        places = {*options.data, *options.held_out}
        assert all(("shuffled" in place) == name.startswith("shuffled") for place in places)
    rows = {
        cells[1].strip(): cells[-2].strip()
        for line in capsys.readouterr().out.splitlines()
        if len(cells := line.split("|")) == 7
    }
    assert rows["without n-gram hash"] == "higher"
    assert rows["structure ids of other documents"] == "lower"
    assert rows["Mamba-3 for M2RNN"] == "no measurable difference"
    assert rows["full MLA for DSA"] == "no measurable difference"
    for suffix in (".json", ".md", ".png"):
        assert (tmp_path / "out" / f"nam56r_parts_h200{suffix}").is_file()

    Bench.started = {}
    with pytest.raises(SystemExit):
        parts.main([*asked, "--seeds", "1,2,3,4"], standalone_mode=False)
    assert set(Bench.started) == {f"{name}-4" for name in parts.VARIANTS}, "a run was repeated"


def test_variants_are_models_without_the_part() -> None:
    whole = recipes_index.load(parts.RECIPE)
    made = {
        name: recipes_index.with_text(whole, variant.changes)
        for name, variant in parts.VARIANTS.items()
    }
    assert set(whole.layout.letters) == set(recipes_index.load("nam56r_h200_1gpu").layout.letters)
    assert whole.ngram_hash is not None and made["no_ngram"].ngram_hash is None
    assert whole.structure is not None and made["no_structure"].structure is None
    assert made["shuffled"] == whole
    assert not made["m_for_r"].layout.counts()["R"] and not made["mla_for_dsa"].uses_dsa
    assert len({len(each.layout.letters) for each in made.values()}) == 1


@pytest.mark.parametrize("wrong", [{"mock_data": True}, {"losses": {"lm loss": float("nan")}}])
def test_what_is_not_a_result(wrong: dict[str, Any]) -> None:
    losses = dict.fromkeys(parts.HEADS, 9.0)
    rows = [{"start": "r", "overlay": "a"}, {"evaluated": 1, "losses": losses, "mock_data": False}]
    assert parts.curve(rows)["held_out"]["1"] == losses
    if "losses" in wrong:
        wrong = {"losses": losses | wrong["losses"]}
    with pytest.raises(click.ClickException):
        parts.curve([rows[0], rows[1] | wrong])


@pytest.mark.filterwarnings("ignore")  # of torch, which Megatron's builder imports
def test_documents_get_the_ids_of_others(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(5):
        (text / f"{number}.py").write_text(f"# {number}\n" + "def f(x):\n    return [x]\n" * number)
    prefix, to = tmp_path / "data", tmp_path / "other" / "data"
    prepare(prefix, [text], tokenizers.ByteTokenizer(), structure=True)
    parts.shuffled(prefix, to, seed=0)
    ours, theirs = corpus.open_(prefix), corpus.open_(to)
    assert (ours.tokens, ours.documents) == (theirs.tokens, theirs.documents)
    assert record.name(ours) != record.name(theirs), "a result could not tell the two apart"
    structure_files.check(theirs, lambda codes: None)
    before, after = (
        np.fromfile(corpus.with_suffix(each, ".structure.bin"), np.uint8) for each in (prefix, to)
    )
    assert before.shape == after.shape and (before != after).any()
    assert ours.data_file.read_bytes() == theirs.data_file.read_bytes()
    card = json.loads(corpus.with_suffix(to, ".json").read_text())
    assert card["fingerprint"] == theirs.card.fingerprint  # type: ignore[union-attr]
