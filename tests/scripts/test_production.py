"""The page of production status: what a result file says, what it does not, and who says it."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from cppmega.recipe import M2RNN, Mamba3
from cppmega.recipe import index as recipes_index
from cppmega.recipe.arithmetic import flops, megatron_flops
from tests.recipe.test_arithmetic import BASE
from tests.support import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
production = importlib.import_module("production")

NAME = "nam56r_h200_2gpu_ep2"
RESULT = {
    "recipe": NAME,
    "headline": "2 x NVIDIA H200: overlay 18500 tokens/s",
    "date": "2026-12-01",
    "gpus": 2,
    "changes": ["train_iters=40", "micro_batch_size=8"],
    "stack": {"torch": "2.11.0", "gpu": "NVIDIA H200", "megatron-core": "0.19.2"},
    "runs": {
        "overlay": {
            "overlay": "0123456789abcdef",
            "steps": 40,
            "tokens_per_second": 18500.0,
            "peak_gib": 117.26,
        },
        "larger": {"out_of_memory": True},
    },
}


@pytest.fixture(name="folder")
def results(tmp_path: Path) -> Path:
    """A folder with one result, a curve of another kind, and what was reported."""
    shutil.copy(production.RESULTS / f"{production.EARLIER}.json", tmp_path)
    (tmp_path / "whole.json").write_text(json.dumps(RESULT))
    (tmp_path / "kernels.json").write_text(json.dumps({"rows": [1]}))
    (tmp_path / "list.json").write_text("[]")
    return tmp_path


def cells(table: str, first: str) -> list[str]:
    """The row of a table that begins so."""
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {first}")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_row_has_both_throughputs_of_one_gpu(folder: Path) -> None:
    fits, too_large = production.runs(folder)
    recipe = recipes_index.load(NAME).with_(micro_batch_size=8, train_iters=40)
    assert fits.recipe == recipe and fits.tokens == 9250
    row = fits.cells("results")
    assert row[0] == f"[{NAME}, micro_batch_size=8](results/whole.md)"
    assert row[1:5] == ["overlay", "2 x H200", "bf16", "40"]
    assert [float(cell) for cell in row[5:8]] == [
        9250,
        round(flops(recipe) * 9250 / 1e12),
        round(production.record_flops(recipe) * 9250 / 1e12),
    ]
    assert row[8:] == ["117.3", "2026-12-01"]
    assert too_large.cells("results")[4:9] == ["", "out of memory", "", "", ""]


def test_what_was_only_reported_says_so(folder: Path) -> None:
    table = production.reported(folder)
    assert cells(table, "PP 1, EP 4")[3:] == ["9,250", "237", "289", "127", production.REPORTED]
    for experts in ("EP 4", "EP 2"):
        in_stages = cells(table, f"PP 2, VPP 2, {experts}")
        assert in_stages[3:] == ["6,200", "159", "193", "", production.REPORTED]
    assert cells(table, "the first row in FP8")[3:6] == ["8,950", "229", "279"]
    assert cells(table, "PP 1, EP 8, MBS 10")[3:6] == ["not reported", "221", "268"]
    # Without MTP, a token costs less than the formula of the record counts.
    assert cells(table, "PP 1, MBS 4, combined 1F1B")[3:6] == ["5,900", "115", "182"]
    for line in table.splitlines()[2:]:
        assert line.endswith(f"| {production.REPORTED} |")


def test_every_recipe_says_how_it_starts_and_whether_it_ran(folder: Path) -> None:
    sections: dict[str, Any] = {}
    for part in production.page(folder).split("\n### ")[1:]:
        name, _, text = part.partition("\n")
        sections[name] = text
    loops = {"smoke_cpu"}
    assert set(sections) == set(recipes_index.shipped()) - loops
    for name, text in sections.items():
        recipe = recipes_index.load(name)
        gates = "".join(f"{key}={value} " for key, value in recipe.wanted_gates)
        assert f"`{gates}cppmega launch {name} --data data/corpus`" in text
        asked = f" --recipe {name}" if "te_plain_layers" in recipe.patches else ""
        assert f"`{gates}python -m cppmega.apply_patches{asked}`" in text
        assert (production.NOT_MEASURED in text) == (name != NAME)
    ran = sections[NAME]
    assert "torch 2.11.0, megatron-core 0.19.2 | 0123456789abcdef | curve in `whole.json` |" in ran
    assert "| not said | none |" in ran


def test_a_log_is_named_where_there_is_one(folder: Path) -> None:
    (folder / "whole.json").write_text(json.dumps({**RESULT, "log": "whole.log"}))
    assert "| 0123456789abcdef | whole.log |" in production.page(folder)


def test_the_page_has_the_table_of_what_was_measured() -> None:
    page = (REPOSITORY / "docs" / "production.md").read_text()
    assert production.measured("results") in page


@pytest.mark.parametrize(
    ("tokens_per_second", "by_the_record", "counted"),
    [(9_250, 289, 237), (6_200, 193, 159), (11_300, 351, 289)],
)
def test_speeds_of_the_record_in_both_units(
    tokens_per_second: float, by_the_record: float, counted: float
) -> None:
    """Tokens/s per GPU and TFLOP/s per GPU as reported, the latter from unrounded tokens/s."""
    recipe = recipes_index.load("nam56r_h200_8gpu_bf16")
    assert production.record_flops(recipe) == pytest.approx(31.03e9, rel=1e-4)
    reported = production.record_flops(recipe) * tokens_per_second / 1e12
    assert reported == pytest.approx(by_the_record, rel=0.01)
    assert flops(recipe) * tokens_per_second / 1e12 == pytest.approx(counted, abs=0.5)


def test_the_formula_of_the_record_takes_letters_for_others() -> None:
    sizes = Mamba3(head_dim=16, state_dim=32)
    mixed = BASE.with_(pattern="+D-R", m2rnn=M2RNN(5, 3, 3), mamba3=sizes)
    other = BASE.with_(pattern="**-M", mamba3=sizes)
    assert production.record_flops(mixed) == megatron_flops(other) == production.record_flops(other)
    assert megatron_flops(mixed) < production.record_flops(mixed)
    # Without a Mamba-3 of its own, R is Mamba-2 of Megatron's own sizes.
    assert production.record_flops(
        mixed.with_(mamba3=None, hidden_size=512)
    ) == production.record_flops(mixed.with_(mamba3=Mamba3(), hidden_size=512))
