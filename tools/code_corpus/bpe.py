"""A byte-level BPE tokenizer, trained on the model's training text.

Training is deterministic: the same texts give the same file, with the same version of the package
tokenizers. Any UTF-8 text can be encoded and is decoded unchanged.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cppmega.data.tokenizers import not_installed
from cppmega.errors import CppmegaError

END = "<|endoftext|>"
"""The token that ends a document; it must not occur in a text."""

_WORDS = (
    r"\s*\n[^\S\n]*"  # ends of lines, with the indent of the next one
    r"|\p{N}{1,3}"
    r"| ?[\p{L}_][\p{L}\p{M}\p{N}_]*"  # names
    r"| ?[^\s\p{L}\p{N}_]+"  # operators
    r"|\s+"
)
"""Where a text is split before pairs are merged: no token crosses such a boundary."""
_BATCH = 1000
"""Texts that are counted in one batch."""


def train(texts: Iterable[str], size: int, folder: Path) -> None:
    """Train a tokenizer, and write it as a model's folder has it.

    Args:
        texts: the documents.
        size: entries of the vocabulary: `END`, which is 0, the 256 bytes, and merged pairs.
        folder: gets `tokenizer.json` and, written before it, `tokenizer_config.json`.

    Raises:
        CppmegaError: `package-missing`, `vocabulary-not-filled`.
    """
    try:
        package: Any = importlib.import_module("tokenizers")
    except ImportError:
        raise not_installed("It trains the vocabulary.") from None
    cut = package.pre_tokenizers
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = cut.Sequence(
        [
            cut.Split(package.Regex(_WORDS), "isolated"),
            cut.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = package.processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=sorted(cut.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_batches(texts), trainer)
    if (entries := tokenizer.get_vocab_size()) != size:
        raise CppmegaError(
            "vocabulary-not-filled",
            f"The training text gives a vocabulary of {entries} entries, not {size}.",
            "Ids that no text can have would be rows of the embedding that are never trained.",
            f"more text, or a vocabulary of {entries} entries",
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}) + "\n")
    new = folder / "tokenizer.json.new"
    tokenizer.save(str(new))
    new.replace(folder / "tokenizer.json")


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    yield batch
