"""The smoke run's text is frozen, and its packs are what the trainer's would be; no Megatron."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from cppmega.recipe.index import load
from cppmega.training.packing import Packed
from examples.smoke import corpus, packs, records

DIGEST = "e152eda7757267ee"
"""Curves made with another text cannot be compared with the ones in `benchmarks/results`."""


def test_the_corpus_is_frozen() -> None:
    documents = corpus.documents()
    assert corpus.digest(documents) == DIGEST
    assert len(set(documents)) == len(documents) == 5000
    assert 0.08 < sum(map(corpus.held_out, documents)) / len(documents) < 0.12
    assert corpus.TEXT.stat().st_size < 300_000


def test_a_folder_is_named_by_what_it_was_built_from(tmp_path: Path) -> None:
    assert corpus.fingerprint(tmp_path) == DIGEST, "nothing is built there yet"
    corpus.write_card(tmp_path, [b"other", b"text"])
    assert corpus.fingerprint(tmp_path) == corpus.digest([b"other", b"text"]) != DIGEST
    (tmp_path / "card.json").unlink()
    (tmp_path / "held_out.idx").touch()
    assert corpus.fingerprint(tmp_path) == "unknown", "built by a version that wrote no card"


def batches(seed: int = 1) -> Iterator[Packed]:
    texts = corpus.documents()[:100]
    return packs.packed([np.array([*text, packs.END]) for text in texts], load("smoke_cpu"), seed)


def test_packs_are_padded_documents_of_the_corpus() -> None:
    batch = next(batches())
    assert batch.tokens.shape == (1, 1024)
    texts = set(corpus.documents()[:100])
    complete = [
        bytes(batch.tokens[0, start : start + length - 1].tolist())
        for start, length in zip(batch.starts, batch.lengths, strict=True)
        if batch.tokens[0, start + length - 1] == packs.END and start % 128
    ]
    assert len(complete) > 10 and set(complete) <= texts
    assert all(start % 16 == 0 for start in batch.starts)
    assert 0.25 < 1 - sum(batch.lengths) / 1024 < 0.45, "padding is a share that matters"
    assert not batch.loss_mask[batch.tokens == packs.END].any()


def test_the_order_of_the_documents_is_the_seed_s() -> None:
    first, again, other = (list(islice(batches(seed), 3)) for seed in (1, 1, 2))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].tokens, other[0].tokens)
    assert not torch.equal(first[0].tokens, first[1].tokens)


def test_true_labels_stop_at_the_end_of_each_document() -> None:
    batch = next(batches())
    for depth in (0, 1, 2):
        labels, mask = packs.true_labels(batch, depth)
        assert int(mask.sum()) == sum(
            max(length - depth - bool(batch.tokens[0, start + length - 1] == packs.END), 0)
            for start, length in zip(batch.starts, batch.lengths, strict=True)
        )
        for at in mask[0].nonzero().flatten().tolist()[:200]:
            assert labels[0, at] == batch.labels[0, at + depth]


def test_a_summary_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    earlier = {
        "overlay": "stock",
        "steps": 200,
        "final_loss": 2.36,
        "final_mtp_loss": 2.22,
        "mtp_labels": 398599,
        "wrong_mtp_labels": 12720,
        "compile_helpers": "exit 1",
    }
    (tmp_path / records.SUMMARY).write_text(json.dumps(earlier))
    summary = records.read_summary(tmp_path)
    assert summary.is_stock and summary.seed == 1234 and summary.corpus == "unknown"
    records.write(tmp_path / records.SUMMARY, summary)
    assert records.read_summary(tmp_path) == summary
