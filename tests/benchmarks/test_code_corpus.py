"""The measured corpus is that of the shipped list, and what its page says."""

from __future__ import annotations

import importlib
import json
from typing import Any

import msgspec
import pytest

from tests.support import REPOSITORY
from tools.code_corpus import listing

code_corpus = importlib.import_module("benchmarks.code_corpus")
RESULTS = REPOSITORY / "benchmarks" / "results"


@pytest.fixture(name="result")
def measured() -> dict[str, Any]:
    return json.loads((RESULTS / "code_corpus.json").read_text())


def test_the_page_is_what_was_measured(result: dict[str, Any]) -> None:
    assert (RESULTS / "code_corpus.md").read_text() == code_corpus.page(result)


def test_it_was_made_of_the_shipped_list(result: dict[str, Any]) -> None:
    made = [project["source"] for project in result["card"]["projects"]]
    listed = msgspec.convert(made, tuple[listing.Source, ...])
    assert listed == listing.load(), "run python -m benchmarks.code_corpus"


def test_it_is_enough_to_train_on(result: dict[str, Any]) -> None:
    card = result["card"]
    train, heldout = card["parts"]["train"], card["parts"]["heldout"]
    assert train["tokens"] > 20e6 and heldout["tokens"] > 1e6
    assert train["share"] > 0.9 and heldout["share"] > 0.9
    assert card["archive_bytes"] < 50e6 and card["tokenizer"]["vocab_size"] == 65536
    for part in (train, heldout):
        assert {"c", "cpp", "python"} <= part["structure"]["tokens"].keys()
        assert part["documents"] == sum(part["structure"]["documents"].values())
