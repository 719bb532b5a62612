"""A small byte-level BPE, trained on the spot, and the structure codes of its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cppmega.data import structure_labels

END = "<end>"


def byte_level(texts: Iterable[str], size: int, *, trim: bool = False) -> Any:
    """A tokenizer of the package tokenizers that ends a document with `END`.

    Args:
        texts: what it learns its merges from.
        size: ids.
        trim: whether its places leave out a token's leading blank, as GPT-2's do.
    """
    import tokenizers

    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    return trained


def saved(folder: Path, tokenizer: Any) -> Path:
    """Write it as a model's folder has it; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(f'{{"eos_token": "{END}"}}')
    return folder


def codes_of(text: bytes, language: Any, tokenizer: Any, ids: Iterable[int]) -> list[int]:
    """The structure code of every token of a document, without the places that the package gives.

    A character of a byte-level token stands for one byte, so the lengths of the tokens tell.
    """
    of_bytes, _ = structure_labels.of_bytes(text, language)
    place, codes = 0, []
    for one in ids:
        within = range(place, place + len(tokenizer._tokenizer.id_to_token(int(one))))
        solid = [i for i in within if not text[i : i + 1].isspace()]
        codes.append(int(of_bytes[(solid or within)[0]]))
        place = within.stop
    assert place == len(text)
    return codes
