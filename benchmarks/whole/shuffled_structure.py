"""A copy of a dataset whose documents have each other's structure ids: input that means nothing."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import msgspec
import numpy as np

from cppmega.data import corpus
from cppmega.data.corpus import with_suffix
from cppmega.data.structure import COLUMN


def shuffled(prefix: Path, to: Path, seed: int) -> Path:
    """Copy a dataset to another prefix, with the ids of another document for every document.

    Ids of a document that is shorter than the one that gets them are repeated from their start.

    Args:
        prefix: a dataset with structure ids, one sequence per document.
        to: prefix of the copy; its folder is created.
        seed: of the order of documents.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    found = corpus.open_(prefix)
    assert found.card is not None and found.card.structure is not None, "no structure ids"
    documents = IndexedDataset(str(with_suffix(prefix, COLUMN)))
    order = np.random.default_rng(seed).permutation(len(documents))
    others = dict(zip(order.tolist(), np.roll(order, 1).tolist(), strict=True))  # never its own
    given = [
        np.resize(documents[others[at]], length)
        for at, length in enumerate(documents.sequence_lengths)
    ]

    to.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".bin", ".idx", f"{COLUMN}.idx"):
        shutil.copyfile(with_suffix(prefix, suffix), with_suffix(to, suffix))
    ids = np.concatenate(given).tobytes()
    with_suffix(to, f"{COLUMN}.bin").write_bytes(ids)
    record = msgspec.structs.replace(
        found.card.structure, bin_sha256=hashlib.sha256(ids).hexdigest()
    )
    card = msgspec.structs.replace(found.card, structure=record)
    with_suffix(to, ".json").write_text(card.dump())
    return to
