"""A prepared dataset on disk, inspected without torch: is it complete, and whose tokens are these?

`PREFIX.bin` and `PREFIX.idx` are Megatron's; `PREFIX.json` is the card that `prepare_data` writes
last, so a dataset without it is unfinished or was written by another tool.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from cppmega.data import index_file
from cppmega.data.index_file import Index
from cppmega.data.structure import COLUMN
from cppmega.data.tokenizers import TokenizerRecord
from cppmega.errors import CppmegaError
from cppmega.host import json_text

_LOOK = 1 << 20
"""Tokens at each end of a dataset that are checked if it was not read completely yet."""
_HIGHEST = {
    **{"uint8": 2**8, "int8": 2**7, "int16": 2**15, "uint16": 2**16, "int32": 2**31},
    "int64": 2**63,
}
"""Type -> the ids that it can hold."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class StructureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A card's record of the structure ids of its tokens."""

    definition: Annotated[int, msgspec.Meta(ge=1)]
    """`structure.DEFINITION` of the release that made them."""
    grammars: dict[str, str]
    """Package -> version, of tree-sitter and its grammars."""
    tokenizer: str
    """Digest of the tokenizer's record."""
    documents: dict[str, Count]
    """Language, `no grammar` or `not parsed` -> documents."""
    tokens: dict[str, Count] = {}
    """The same -> tokens, the ends of documents left out; empty if an earlier release wrote it."""
    with_kind: dict[str, Count] = {}
    """The same -> those of them whose kind is not 0."""
    bin_sha256: str
    idx_sha256: str

    @property
    def share(self) -> float | None:
        """Part of the tokens whose kind is not 0; None if it was not counted."""
        tokens = sum(self.tokens.values())
        return sum(self.with_kind.values()) / tokens if tokens else None

    @property
    def said(self) -> str:
        """One line about it."""
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.documents.items()))
        share = f", {self.share:.1%} of the tokens have a kind" if self.share is not None else ""
        return f"structure ids of definition {self.definition} ({counts}){share}"


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """The record that `prepare_data` writes next to a dataset."""

    tokenizer: TokenizerRecord
    documents: Count
    tokens: Count
    """The ends of documents included."""
    dtype: str
    bin_sha256: str
    idx_sha256: str
    sources: Count
    """Files read."""
    skipped: dict[str, int] = {}
    """Reason -> documents that are not in the dataset."""
    structure: StructureRecord | None = None
    """None: its tokens have no structure ids."""
    schema: int = 1

    @property
    def fingerprint(self) -> str:
        """One name for the content, for logs, checkpoints and results."""
        hashes = self.bin_sha256 + self.idx_sha256
        if self.structure is not None:
            hashes += self.structure.bin_sha256 + self.structure.idx_sha256
        return hashlib.sha256(hashes.encode()).hexdigest()[:16]

    def dump(self) -> str:
        """The JSON text."""
        card = {**msgspec.to_builtins(self), "fingerprint": self.fingerprint}
        if self.structure is None:
            del card["structure"]  # as earlier releases wrote it
        return json.dumps(card, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class Corpus:
    """A dataset whose files are complete."""

    prefix: Path
    tokens: int
    index: Index
    card: Card | None
    """None: it was not prepared with `prepare_data`."""

    @property
    def data_file(self) -> Path:
        """`PREFIX.bin`."""
        return with_suffix(self.prefix, ".bin")

    @property
    def documents(self) -> int:
        """Number of documents, by the index."""
        return self.index.documents

    @property
    def dtype(self) -> str:
        """Type of the ids."""
        return self.index.dtype

    @property
    def size(self) -> int:
        """Bytes of both files."""
        return self.data_file.stat().st_size + self.index.path.stat().st_size


def read_card(prefix: Path) -> Card | None:
    """Read the card of a dataset; None if it has none.

    Raises:
        CppmegaError: `data-broken`.
    """
    path = with_suffix(prefix, ".json")
    try:
        raw = json_text.read(path)
        if not isinstance(raw, dict) or not raw:
            raise ValueError("it is not a JSON object with the fields of a card")
        if "bin_sha256" not in raw:
            return None  # another tool's file of that name
        card = msgspec.convert(raw, Card)
        problem = _card_problem(card, raw.get("fingerprint"))
    except FileNotFoundError:
        return None
    except ValueError as error:  # not JSON, or fields that are missing or invalid
        problem = str(error)
    if problem:
        raise CppmegaError(
            "data-broken",
            f"{path} cannot be used: {problem}",
            "It records which tokenizer made the data.",
            "upgrade cppmega if a later release wrote it; else restore it, or prepare the data "
            f"again under another name than {prefix}",
        )
    return card


def _card_problem(card: Card, fingerprint: object) -> str:
    """Why a card cannot be used; empty if it can."""
    if card.schema != 1:
        return f"it has schema {card.schema}, and this release of cppmega reads schema 1"
    if fingerprint != card.fingerprint:
        return f"its fingerprint is {fingerprint}, and that of its hashes {card.fingerprint}"
    if card.structure is not None and card.structure.tokenizer != card.tokenizer.digest:
        return "its structure ids belong to the tokens of another tokenizer"
    return ""


def open_(prefix: Path) -> Corpus:
    """Open a dataset whose files are present, complete and consistent.

    Raises:
        CppmegaError: `data-not-found`, `data-unfinished`, `data-broken`.
    """
    index, data = with_suffix(prefix, ".idx"), with_suffix(prefix, ".bin")
    missing = [path.name for path in (index, data) if not path.is_file()]
    if missing:
        parts = with_suffix(prefix, ".parts")
        name = "data-unfinished" if parts.is_dir() else "data-not-found"
        named = {path.with_suffix("") for path in prefix.parent.glob("*.idx")}
        here = sorted(path.name for path in named if path.suffix != COLUMN)
        raise CppmegaError(
            name,
            f"{prefix}: {' and '.join(missing)} missing"
            + (f"; that folder holds {', '.join(here[:5])}." if here else "."),
            "Megatron would train on mock data, or stop after the model has been built.",
            "run the same python -m cppmega.data.command again: it resumes where it was stopped"
            if parts.is_dir()
            else f"python -m cppmega.data.command --out {prefix} TEXT..., or correct --data",
        )
    if (with_suffix(prefix, ".parts") / "state.json").is_file():
        raise CppmegaError(
            "data-unfinished",
            f"{prefix} is still being prepared, or its preparation was stopped.",
            "Its files may be replaced or completed while it is read.",
            "run the same python -m cppmega.data.command again: it resumes where it was stopped",
        )
    header = index_file.read_header(index)
    index_file.check_ends(header, data.stat().st_size)
    tokens = data.stat().st_size // header.token_bytes
    if tokens == 0:
        raise index_file.broken(prefix, "it holds no tokens")
    card = read_card(prefix)
    dataset = Corpus(prefix, tokens, header, card)
    if card is not None:
        _refuse_other_card(dataset, card)
    return dataset


def _refuse_other_card(dataset: Corpus, card: Card) -> None:
    there = (dataset.tokens, dataset.documents, dataset.dtype)
    if (card.tokens, card.documents, card.dtype) != there:
        raise index_file.broken(
            dataset.prefix,
            f"its card describes {card.tokens} tokens in {card.documents} documents as "
            f"{card.dtype}, the index {dataset.tokens} in {dataset.documents} as {dataset.dtype}",
        )


def check_ids(dataset: Corpus, vocab_size: int) -> None:
    """Check that the tokens at both ends of a dataset are ids of the vocabulary.

    Raises:
        CppmegaError: `token-out-of-vocabulary`.
    """
    import numpy as np

    look = min(_LOOK, dataset.tokens)
    for begin in dict.fromkeys((0, dataset.tokens - look)):
        at = begin * dataset.index.token_bytes
        with index_file.readable(dataset.data_file):
            part = np.fromfile(dataset.data_file, dtype=dataset.dtype, count=look, offset=at)
        if len(part) < look:
            raise index_file.broken(dataset.data_file, "it became shorter while it was read")
        for which in (int(np.argmax(part)), int(np.argmin(part))):
            check_id(dataset, int(part[which]), begin + which, vocab_size)


def check_id(dataset: Corpus, token: int, position: int, vocab_size: int) -> None:
    """Check that one token is an id of the vocabulary.

    Raises:
        CppmegaError: `token-out-of-vocabulary`.
    """
    if 0 <= token < vocab_size:
        return
    wider = f"--set vocab_size={token + 1} or more and the tokenizer that made it, or "
    raise CppmegaError(
        "token-out-of-vocabulary",
        f"{dataset.data_file} holds token {token} at position {position}; the vocabulary has the "
        f"ids 0 to {vocab_size - 1}.",
        "The embedding has no row for it, or a row of the padding that belongs to no token.",
        (wider if token >= 0 else "") + "data prepared with the model's tokenizer",
    )


def check_width(dataset: Corpus, vocab_size: int) -> None:
    """Check that the type of the ids holds the vocabulary: numpy wraps ids that do not fit.

    Raises:
        CppmegaError: `data-type-too-narrow`.
    """
    if vocab_size > _HIGHEST[dataset.dtype]:
        raise CppmegaError(
            "data-type-too-narrow",
            f"{dataset.prefix} holds its tokens as {dataset.dtype}; the tokenizer has {vocab_size} "
            "ids.",
            "Ids that do not fit were stored as other ids, and can no longer be recognized.",
            "prepare the data again, or name the tokenizer that made it with --tokenizer",
        )


def digest(prefix: Path) -> tuple[str, str]:
    """SHA-256 of the data file and of the index."""
    hashes = []
    for suffix in (".bin", ".idx"):
        with with_suffix(prefix, suffix).open("rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashes[0], hashes[1]


def with_suffix(prefix: Path, suffix: str) -> Path:
    """Append a suffix; a prefix may contain dots, and no part of it is replaced."""
    return prefix.with_name(prefix.name + suffix)
