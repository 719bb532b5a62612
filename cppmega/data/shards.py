"""Shards of a dataset that is being prepared, written by Megatron's own builder.

A dataset has one column, the token ids, or two: `NAME.structure.bin` and `NAME.structure.idx` are
an indexed dataset of the same sequences with one byte for each token, its structure code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cppmega.data.encoding import Batch, Encoded
from cppmega.data.structure import COLUMN, LEVELS
from cppmega.data.tokenizers import Tokenizer
from cppmega.host import interpreter
from cppmega.tree.installed import find_root


class Shard:
    """One shard being written."""

    def __init__(self, parts: Path, name: str, tokenizer: Tokenizer, structure: bool) -> None:
        self.parts, self.name = parts, name
        self.tokens = self.documents = self.read = 0
        self.skipped: Counter[str] = Counter()
        """Reason -> documents left out."""
        self.languages: Counter[str] = Counter()
        """Language, or why there is none -> documents with structure codes."""
        self.tokens_of: Counter[str] = Counter()
        """The same -> tokens, the ends of documents left out."""
        self.kinds_of: Counter[str] = Counter()
        """The same -> tokens whose kind is not 0."""
        self._columns = builders(parts, name, ".new", tokenizer, structure)

    def add(self, batch: Batch) -> None:
        """Write a batch, and count what was left out."""
        for document in batch.documents:
            self._columns[""].add_document(document.ids, [len(document.ids)])
            self.tokens += len(document.ids)
            if document.codes is not None:
                self._write_codes(document)
        self.documents += len(batch.documents)
        self.skipped.update(batch.skipped)
        self.read += batch.read

    def _write_codes(self, document: Encoded) -> None:
        self._columns[COLUMN].add_document(document.codes, [len(document.codes)])
        self.languages[document.language] += 1
        self.tokens_of[document.language] += len(document.codes) - 1
        self.kinds_of[document.language] += int((document.codes >= LEVELS).sum())

    def close(self) -> None:
        """Close the data files; one that is not finished is removed by the next call."""
        for builder in self._columns.values():
            builder.data_file.close()

    def finish(self) -> None:
        """Close the files, and give them their names."""
        for column, builder in self._columns.items():
            builder.finalize(str(self.parts / f"{self.name}{column}.idx.new"))
        for column in self._columns:
            for suffix in (".bin", ".idx"):
                path = self.parts / f"{self.name}{column}{suffix}"
                path.with_name(path.name + ".new").replace(path)


def join(
    parts: Path, names: Sequence[str], tokenizer: Tokenizer, structure: bool
) -> dict[str, str]:
    """Join finished shards to `whole`.

    Returns:
        Column -> type of its numbers.
    """
    columns = builders(parts, "whole", "", tokenizer, structure)
    for column, builder in columns.items():
        for name in names:
            builder.add_index(str(parts / f"{name}{column}"))
        builder.finalize(str(parts / f"whole{column}.idx"))
    return {column: builder.dtype.__name__ for column, builder in columns.items()}


def builders(
    parts: Path, name: str, ending: str, tokenizer: Tokenizer, structure: bool
) -> dict[str, Any]:
    """Begin the data files of a shard: column -> Megatron's builder of an indexed dataset."""
    try:
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    except ModuleNotFoundError:
        interpreter.require_torch(find_root(), "cppmega.data.command")
        raise
    import numpy as np

    types = {"": DType.optimal_dtype(tokenizer.vocab_size)}
    if structure:
        types[COLUMN] = np.uint8
    return {
        column: IndexedDatasetBuilder(str(parts / f"{name}{column}.bin{ending}"), dtype=dtype)
        for column, dtype in types.items()
    }
