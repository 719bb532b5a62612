"""Pages of results say what is in the files next to them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
RESULTS = REPOSITORY / "benchmarks" / "results"
WRITERS = {
    "mhc_training": ("mhc_training", "of_recipe"),
    "parts": ("parts", "report"),
    "refusals": ("refusals", "page"),
    "slice_training": ("slice_report", "table"),
    "whole_rows": ("whole_rows", "page"),
    "whole_training": ("whole_report", "page"),
}


def _benchmark(path: Path) -> str:
    """Who writes the page of a result; empty for results of another layout."""
    result = json.loads(path.read_text())
    found = result.get("benchmark", "") if "schema" in result else ""
    if found == "whole_rows" and "rows" not in result:
        return "slice_training"  # one row of many, as a run of its own
    return found if found in WRITERS else ""


PAGES = [path for path in sorted(RESULTS.glob("*.json")) if _benchmark(path)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_written_from_its_result(path: Path) -> None:
    """Remarks may follow."""
    module, function = WRITERS[_benchmark(path)]
    written = getattr(importlib.import_module(module), function)(json.loads(path.read_text()))
    assert path.with_suffix(".md").read_text().startswith(written)


def test_every_writer_has_a_page() -> None:
    assert {_benchmark(path) for path in PAGES} == set(WRITERS)
