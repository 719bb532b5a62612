"""Runs that one call of a benchmark begins and the next continues."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

pytest.importorskip("torch")
series = importlib.import_module("benchmarks.slices.series")
results = importlib.import_module("benchmarks.harness.results")
MODEL = series.Model("smoke_cpu", ("seed=7",), {"first": (), "second": ("lr=0.001",)})


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[str]]]:
    """A series whose runs take no time, and the names of those that were started."""
    started: list[str] = []

    def trained(bench: Any, name: str, tree: Path) -> list[Any]:
        started.append(name)
        assert "seed=7" in bench.changes and "train_iters=20" in bench.changes
        if "second" in name and len(started) < 3:
            raise click.ClickException("it failed")
        return []

    facts = {"recipe": "", "changes": [], "data": {}, "gpus": 1, "stack": {"gpu": "NVIDIA H200"}}
    monkeypatch.setattr(series.runs, "trained", trained)
    monkeypatch.setattr(series.runs, "header", lambda bench: facts | {"data": str(bench.data)})
    monkeypatch.setattr(series.Bench, "tree", lambda bench, name: tmp_path)
    monkeypatch.setattr(series, "measured", lambda rows: {"milliseconds": len(started)})
    places = results.Places(tmp_path, tmp_path, tmp_path, tmp_path)
    yield series.Series(places, "made", str, 20, time.monotonic() + 600), started


def test_a_failed_run_does_not_end_others(made: tuple[Any, list[str]]) -> None:
    first, started = made
    first.model("small", MODEL, series.turns(MODEL.runs, 2))
    assert started == ["small-first-0", "small-second-0", "small-first-1"]
    assert first.failed == {"small, second"}


def test_the_next_call_makes_what_is_missing(made: tuple[Any, list[str]]) -> None:
    first, started = made
    first.model("small", MODEL, series.turns(MODEL.runs, 1))
    again = replace(first, failed=set())
    again.model("small", MODEL, series.turns(MODEL.runs, 1))
    again.model("small", MODEL, series.turns(MODEL.runs, 1))
    assert started == ["small-first-0", "small-second-0", "small-second-0"]
    found = json.loads((first.places.out / "made_h200.json").read_text())
    runs = found["models"]["small"]["runs"]
    assert runs == {"first": [{"milliseconds": 1}], "second": [{"milliseconds": 3}]}


def test_runs_on_other_data_are_not_added(made: tuple[Any, list[str]], tmp_path: Path) -> None:
    first, started = made
    first.model("small", MODEL, [(0, "first")])
    other = replace(first, places=first.places._replace(data=tmp_path / "other"))
    with pytest.raises(click.ClickException, match="on other data"):
        other.model("small", MODEL, [(1, "first")])
    assert started == ["small-first-0"]


def test_no_run_starts_without_time(made: tuple[Any, list[str]]) -> None:
    first, started = made
    replace(first, deadline=time.monotonic() + 60).model("small", MODEL, [(0, "first")])
    assert not started


def test_runs_are_chosen_in_order_of_model() -> None:
    assert series.chosen(MODEL, ("second", "first")) == ["first", "second"]
    assert series.chosen(MODEL, ()) == ["first", "second"]
    assert list(series.turns("ab", 2)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
