"""Shards of a dataset that is being prepared, written by Megatron's own builder.

A dataset has one column, the token ids, or two: `NAME.structure.bin` and `NAME.structure.idx` are
an indexed dataset of the same sequences with one byte for each token, its structure code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cppmega.data import structure_labels
from cppmega.data.sources import Document
from cppmega.data.structure import COLUMN
from cppmega.data.tokenizers import Placed, Tokenizer
from cppmega.host import interpreter
from cppmega.tree.installed import find_root

T = TypeVar("T")


class Shard:
    """One shard being written."""

    def __init__(self, parts: Path, name: str, tokenizer: Tokenizer, structure: bool) -> None:
        self.parts, self.name, self.tokenizer = parts, name, tokenizer
        self.tokens = self.documents = self.read = 0
        self.skipped: Counter[str] = Counter()
        """Reason -> documents left out."""
        self.languages: Counter[str] = Counter()
        """Language, or why there is none -> documents with structure codes."""
        self._columns = builders(parts, name, ".new", tokenizer, structure)
        self._ids = self._columns[""]

    def add(self, batch: Sequence[Document]) -> None:
        """Encode and write a batch; counts what is left out."""
        self.skipped.update(document.problem for document in batch if document.problem)
        documents = [document for document in batch if not document.problem]
        codes = self._columns.get(COLUMN)
        if codes is None:
            for _, ids in self._encoded(documents, self.tokenizer.encode):
                self._write_ids(ids)
        else:
            for document, placed in self._encoded(documents, self.tokenizer.encode_placed):
                self._write_ids(placed.ids)
                self._write_codes(codes, document, placed)
        self.read += len(batch)

    def _encoded(
        self, documents: Sequence[Document], encode: Callable[[Sequence[bytes]], list[T]]
    ) -> list[tuple[Document, T]]:
        """The documents that are texts, with what the tokenizer makes of them."""
        try:
            return list(zip(documents, encode([one.text for one in documents]), strict=True))
        except UnicodeDecodeError:
            if len(documents) > 1:
                return [pair for one in documents for pair in self._encoded([one], encode)]
            self.skipped["not UTF-8"] += 1
            return []

    def _write_ids(self, ids: Sequence[int]) -> None:
        whole = [*ids, self.tokenizer.eod]
        self._ids.add_document(whole, [len(whole)])
        self.tokens += len(whole)
        self.documents += 1

    def _write_codes(self, codes: Any, document: Document, placed: Placed) -> None:
        """Write the structure codes of a document and of its end, which has none."""
        of_bytes, parsed = structure_labels.of_bytes(document.text, document.language)
        of_tokens = structure_labels.of_tokens(
            document.text, of_bytes, placed.begins, placed.ends
        ).tolist()
        codes.add_document([*of_tokens, 0], [len(of_tokens) + 1])
        language = document.language or "no grammar"
        self.languages[language if parsed or not document.language else "not parsed"] += 1

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
