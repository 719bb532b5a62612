"""Datasets of bytes that the preflight is asked about, and launches on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from cppmega.data import corpus
from cppmega.data.corpus import Card, StructureRecord, with_suffix
from cppmega.data.structure import COLUMN, DEFINITION
from cppmega.data.tokenizers import TokenizerRecord
from cppmega.preflight.context import Context
from tests.preflight.contexts import SLICE, launch
from tests.support import patched
from tests.support.datasets import write

BYTES = {"kind": "byte", "vocab_size": 257, "eod": 256}


def dataset(prefix: Path, tokens: int = 20_000, **tokenizer: Any) -> Path:
    """An indexed dataset of bytes, with its card."""
    data, index = corpus.digest(write(prefix, np.arange(tokens) % 257, [tokens]))
    card = Card(
        tokenizer=TokenizerRecord(**{**BYTES, **tokenizer}),
        documents=1,
        tokens=tokens,
        dtype="uint16",
        bin_sha256=data,
        idx_sha256=index,
        sources=1,
    )
    with_suffix(prefix, ".json").write_text(card.dump())
    return prefix


def with_structure(prefix: Path, **of_record: Any) -> Path:
    """A dataset of bytes whose tokens have structure ids."""
    card = corpus.read_card(dataset(prefix))
    assert card is not None
    ids = np.arange(card.tokens) % 144
    data, index = corpus.digest(
        write(with_suffix(prefix, COLUMN), ids, [card.tokens], dtype="uint8")
    )
    record = StructureRecord(
        **{
            "definition": DEFINITION,
            "grammars": {},
            "tokenizer": card.tokenizer.digest,
            "documents": {"c": 1},
            "bin_sha256": data,
            "idx_sha256": index,
            **of_record,
        }
    )
    with_suffix(prefix, ".json").write_text(structs.replace(card, structure=record).dump())
    return prefix


def on(prefix: Path | None, *words: str, recipe: Any = SLICE, **more: Any) -> Context:
    given = ("--data", str(prefix)) if prefix is not None else ()
    return launch(recipe, *given, *words, root=patched("0.19.2"), **more)
