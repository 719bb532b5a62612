"""The search for a model's best choice, and the pages of models and of two Megatrons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import models
from benchmarks.harness.results import Places
from benchmarks.harness.runs import STARTS
from benchmarks.slices import megatrons
from cppmega.catalogue import loader as catalogue
from cppmega.overlay.wanted import wanted_patches
from cppmega.recipe import index as recipes_index

MLP, BOTH = ("mlp",), ("mlp", "moe")
_RUN = {
    "tokens_per_second": 100.0,
    "tflops_per_gpu": 50.0,
    "first_loss": 3.0,
    "peak_gib": 60.0,
    "last_loss": 2.0,
    "curve": [[1, 3.0, 1.0, 0.5], [2, 2.5, 1.0, 0.5], [3, 2.0, 1.0, 0.5]],
}


@pytest.mark.parametrize(
    ("fits", "expected"),
    [
        ({(): 2, MLP: 4, BOTH: 4}, [((), 1), ((), 2), ((), 4), (MLP, 4), (MLP, 8), (BOTH, 8)]),
        ({(): 0, MLP: 1, BOTH: 1}, [((), 1), (MLP, 1), (MLP, 2), (BOTH, 2)]),
        ({(): 8, MLP: 8, BOTH: 8}, [((), 1), ((), 2), ((), 4), ((), 8)]),
    ],
)
def test_each_set_begins_where_the_last_ended(
    fits: dict[tuple[str, ...], int], expected: list[models.Choice]
) -> None:
    seen: list[models.Choice] = []

    def tried(choice: models.Choice) -> dict[str, Any] | None:
        seen.append(choice)
        return {"tokens_per_second": choice[1]} if choice[1] <= fits[choice[0]] else None

    rates = models.search([MLP, BOTH], tried)
    assert seen == expected
    assert set(rates) == {choice for choice in expected if choice[1] <= fits[choice[0]]}


def test_the_page_compares_the_sides() -> None:
    trial = {"tokens_per_second": 90.0, "peak_gib": 50.0, "seconds_to_first_step": 30.0}
    side = {"trials": {"1 per pass": trial, "2 per pass": None}, "seconds_to_first_step": 30}
    curve = [[1, 3.0, 1.0, 0.4], [2, 3.5, 1.0, 0.4], [3, 2.25, 1.0, 0.4]]
    faster = {**_RUN, "tokens_per_second": 125.0, "curve": curve}
    without = {"": trial, "te_plain_layers": {**trial, "tokens_per_second": 45.0}}
    result = {
        "date": "2026-11-28",
        "gpus": 1,
        "stack": {"gpu": "NVIDIA H100"},
        "models": {
            "llama3_8b_h100_cut": {
                "stock": {**side, "choice": [[], 1], "run": _RUN},
                "overlay": {**side, "choice": [["mlp"], 4], "run": faster, "without": without},
            }
        },
    }
    page = models.page(result)
    assert "| 125 | 1.250 |" in page
    assert "4 per pass, recomputing mlp" in page
    assert "| 0.2500 |" in page  # the largest difference of losses, but for the second step's
    assert "| `te_plain_layers` | 2.000 | 0.0 |" in page
    assert "out of memory" in page


def test_the_newer_megatron_is_compared() -> None:
    slower = {**_RUN, "tokens_per_second": 90.0, "curve": [[1, 3.0, 1.0, 0.5], [3, 2.5, 1.0, 0.5]]}
    result = {
        "date": "2026-11-28",
        "gpus": 1,
        "stack": {"gpu": "NVIDIA H100"},
        "recipes": {"slice": {"0.19.2": [_RUN] * 2, "0.20.0": [slower] * 2}},
    }
    page = megatrons.page(result)
    assert "| slice | 0.20.0 | 90, 90 | 0.900 | 60.0 | 3.0000 | 2.0000 | 0.5000 |" in page


@pytest.mark.parametrize("name", models.MODELS)
def test_stock_asks_for_no_page_but_those_that_it_says(name: str, tmp_path: Path) -> None:
    model, pages = models.MODELS[name], catalogue.load()
    places = Places(tmp_path, tmp_path, tmp_path, None)
    for recomputed in ((), *model.recomputed):
        stock, overlay = (
            recipes_index.with_text(
                recipes_index.load(name),
                models.Side(model, name, side, places, 0.0).changes((recomputed, 1), 7),
            )
            for side in models.SIDES
        )
        assert set(wanted_patches(stock, pages)) <= {*STARTS, *model.needs}
        assert overlay.uses_linear_cross_entropy and not stock.uses_linear_cross_entropy
    assert set(model.pages) <= set(pages)


@pytest.mark.parametrize("name", models.MODELS)
def test_what_is_left_out_is_not_asked_for(name: str, tmp_path: Path) -> None:
    model, pages = models.MODELS[name], catalogue.load()
    side = models.Side(model, name, "overlay", Places(tmp_path, tmp_path, tmp_path, None), 0.0)
    for page in model.pages:
        changes = side.changes(((), 1), 7, page)
        recipe = recipes_index.with_text(recipes_index.load(name), changes)
        assert page not in wanted_patches(recipe, pages)


def test_sizes_that_peaks_rule_out_are_not_tried() -> None:
    trials: dict[str, Any] = {
        models.label(((), size)): {"peak_gib": peak} for size, peak in ((1, 50.0), (2, 60.0))
    }
    assert not models.too_large(((), 2), trials, 70.0)
    assert models.too_large(((), 4), trials, 79.0)
    assert not models.too_large(((), 4), trials, 80.0)
    assert not models.too_large(((), 4), trials, None)
    assert not models.too_large((MLP, 4), trials, 70.0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"stock": None, "overlay": None}),
        (("--stock", "none", "--overlay", "2"), {"overlay": ((), 2)}),
        (("--stock", "1+moe_act,mlp"), {"stock": (("moe_act", "mlp"), 1), "overlay": None}),
    ],
)
def test_a_side_trains_with_the_given_choice(
    options: tuple[str, ...], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(models, "_measuring", lambda *given: seen.append(given[4]))
    places = ("--site", "s", "--work", "w", "--out", "o")
    CliRunner().invoke(models.run, [*places, *options], catch_exceptions=False)
    assert seen == [expected]


def test_no_side_trains_with_nine_sequences() -> None:
    result = CliRunner().invoke(models.run, ["--overlay", "9"])
    assert result.exit_code == 2 and "from 1 to 8" in result.output
