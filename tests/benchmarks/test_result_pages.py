"""Pages of results say what is in the files next to them."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path

import pytest

from tests.support import REPOSITORY

pytest.importorskip("torch")
RESULTS = REPOSITORY / "benchmarks" / "results"
BENCHMARKS = {
    "context_parallel": ("slices.context_parallel", "page"),
    "mhc_training": ("slices.training", "table"),
    "mhc_with": ("slices.mhc_with", "page"),
    "models": ("models", "page"),
    "slice_megatrons": ("slices.megatrons", "page"),
    "slice_training": ("slices.training", "table"),
    "whole_rows": ("whole.rows", "page"),
    "whole_training": ("whole.training", "page"),
}
"""What writes the pages of a benchmark that its results name."""
NAMES = {
    "cli": ("cli", "table"),
    "configurations": ("configurations", "table"),
    "dsa_attention_h200": ("dsa_attention", "table"),
    "dsa_indexer_h200": ("dsa_indexer", "table"),
    "experts_glue_h200": ("experts_glue", "page"),
    "hadamard_h200": ("hadamard", "page"),
    "input_embeddings_h200": ("input_embeddings", "table"),
    "linear_cross_entropy_h200": ("linear_cross_entropy", "page"),
    "linear_cross_entropy_pull_3345_h200": ("linear_cross_entropy", "page"),
    "mamba3_alone_h200": ("mamba3", "table"),
    "mamba3_h200": ("mamba3", "table"),
    "mhc_h200": ("mhc", "page"),
    "mhc_cutile_h200": ("mhc", "page"),
    "mhc_training_h200": ("slices.mhc_training", "table"),
    "mixer_curves_h100": ("slices.mixer_curves", "table"),
    "mixer_curves_h200": ("slices.mixer_curves", "table"),
    "nam56r_h200_1gpu": ("slices.training", "table"),  # one of many rows, as a run of its own
    "upstream_unit_tests_cpu": ("upstream_tests.report", "table"),
    "upstream_unit_tests_h200": ("upstream_tests.report", "table"),
}
"""And that of a single result."""


def _writer(path: Path) -> tuple[str, str] | None:
    if path.stem in NAMES:
        return NAMES[path.stem]
    result = json.loads(path.read_text())
    return BENCHMARKS.get(result.get("benchmark")) if "schema" in result else None


PAGES = {path: writer for path in sorted(RESULTS.glob("*.json")) if (writer := _writer(path))}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_written_from_its_result(path: Path) -> None:
    """Remarks may follow."""
    module, function = PAGES[path]
    with warnings.catch_warnings(action="ignore"):  # of what Megatron imports
        write = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    made = write(json.loads(path.read_text()))
    text = made if isinstance(made, str) else "\n".join(made)
    assert text and path.with_suffix(".md").read_text().startswith(text)


def test_every_writer_has_a_page() -> None:
    assert set(PAGES.values()) == {*BENCHMARKS.values(), *NAMES.values()}
