"""The page about FP8 in DSA is what the result files and the counted products make it."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from tests.support import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
fp8 = importlib.import_module("dsa_fp8")


def test_the_page_is_what_the_result_files_say() -> None:
    text = fp8.PAGE.read_text()
    assert text == fp8.rewritten(text), "run python scripts/dsa_fp8.py"


@pytest.mark.parametrize("shape", fp8.SHAPES, ids=lambda shape: shape.title)
def test_products_and_rates_are_those_of_the_benchmarks_floors(shape: fp8.Shape) -> None:
    """A floor of the choice is its products, and one write of fp32 scores."""
    cases = json.loads((fp8.RESULTS / "dsa_indexer_h200.json").read_text())["cases"]
    write = fp8.milliseconds(4 * shape.batch * shape.sequence**2, fp8.COPY)
    counted = fp8.milliseconds(shape.scores) + write
    assert counted == pytest.approx(cases[shape.choice]["floor"], abs=1e-3)


@pytest.mark.parametrize("shape", fp8.SHAPES, ids=lambda shape: shape.title)
def test_chosen_pairs_are_those_of_queries_that_see_as_many_keys(shape: fp8.Shape) -> None:
    seen = (min(query + 1, shape.topk) for query in range(shape.sequence))
    assert shape.chosen == shape.batch * sum(seen)


def test_the_scores_alone_are_those_of_the_designs() -> None:
    designs = (fp8.RESULTS / "dsa_indexer_designs.md").read_text()
    assert (
        f"| four rows at once, a row per warp, candidates where the counts put them (as it is) "
        f"| 1.60 | {fp8.SCORES} |" in designs
    )
