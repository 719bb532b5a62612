"""A prepared dataset on disk, looked at without torch: is it whole, and whose tokens are these?

`PREFIX.bin` and `PREFIX.idx` are Megatron's; `PREFIX.json` is the card that `prepare_data` writes
last, so that a dataset without it is unfinished or somebody else's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cppmega.data import index_file
from cppmega.data.index_file import Index
from cppmega.errors import CppmegaError

_LOOK = 1 << 20
"""Tokens at each end of a dataset that was not read whole yet, whose ids are checked."""
_HIGHEST = {
    **{"uint8": 2**8, "int8": 2**7, "int16": 2**15, "uint16": 2**16, "int32": 2**31},
    "int64": 2**63,
}
"""Ids that a type can hold."""


@dataclass(frozen=True, slots=True)
class Card:
    """What `prepare_data` records beside a dataset."""

    tokenizer: dict[str, Any]
    """kind, vocab_size, eod, sha256 of the tokenizer's file."""
    documents: int
    tokens: int
    """The ends of documents included."""
    dtype: str
    bin_sha256: str
    idx_sha256: str
    sources: int
    """Files read."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason -> documents that are not in the dataset."""
    schema: int = 1

    @property
    def fingerprint(self) -> str:
        """One name for the content, for logs, checkpoints and results."""
        return hashlib.sha256((self.bin_sha256 + self.idx_sha256).encode()).hexdigest()[:16]

    def dump(self) -> str:
        """The JSON text."""
        return json.dumps({**asdict(self), "fingerprint": self.fingerprint}, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class Corpus:
    """A dataset that was found whole."""

    prefix: Path
    tokens: int
    index: Index
    card: Card | None
    """None: not prepared with `prepare_data`."""

    @property
    def data_file(self) -> Path:
        """`PREFIX.bin`."""
        return with_suffix(self.prefix, ".bin")

    @property
    def documents(self) -> int:
        """As the index counts them."""
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
    """The card beside a dataset, None where there is none.

    Raises:
        CppmegaError: `data-card-broken`.
    """
    path = with_suffix(prefix, ".json")
    try:
        raw = json.loads(path.read_text())
        if not isinstance(raw, dict) or "bin_sha256" not in raw:
            return None  # somebody else's file of that name
        fingerprint = raw.pop("fingerprint")
        card = Card(**raw)
        problem = _card_problem(card, fingerprint)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problem = str(error)
    if problem:
        raise CppmegaError(
            "data-card-broken",
            f"{path} cannot be used: {problem}",
            "It says which tokenizer made the data.",
            f"restore it, or prepare the data again under another name than {prefix}",
        )
    return card


def _card_problem(card: Card, fingerprint: object) -> str:
    """What a card says that cannot be; empty where nothing is wrong."""
    vocab_size, eod = (_count(card.tokenizer, name) for name in ("vocab_size", "eod"))
    if card.schema != 1:
        return f"it has schema {card.schema}, from another release of cppmega"
    if not 0 <= eod < vocab_size:
        return f"its tokenizer ends a document with id {eod}, and has ids below {vocab_size}"
    if fingerprint != card.fingerprint:
        return f"its fingerprint is {fingerprint}, and that of its hashes {card.fingerprint}"
    return ""


def _count(tokenizer: Mapping[str, Any], name: str) -> int:
    if type(tokenizer[name]) is not int:
        raise TypeError(f"{name} of its tokenizer is {tokenizer[name]!r}")
    return int(tokenizer[name])


def open_(prefix: Path) -> Corpus:
    """Look at a dataset's files: present, whole, of one piece.

    Raises:
        CppmegaError: `data-not-found`, `data-unfinished`, `data-broken`, `data-card-broken`.
    """
    index, data = with_suffix(prefix, ".idx"), with_suffix(prefix, ".bin")
    missing = [path.name for path in (index, data) if not path.is_file()]
    if missing:
        parts = with_suffix(prefix, ".parts")
        name = "data-unfinished" if parts.is_dir() else "data-not-found"
        here = sorted(path.with_suffix("").name for path in prefix.parent.glob("*.idx"))
        raise CppmegaError(
            name,
            f"{prefix}: {' and '.join(missing)} missing"
            + (f"; that folder holds {', '.join(here[:5])}." if here else "."),
            "Megatron would train on mock data, or stop after the model has been built.",
            "run the same scripts/prepare_data.py again: it resumes where it was stopped"
            if parts.is_dir()
            else f"scripts/prepare_data.py --out {prefix} TEXT..., or correct --data",
        )
    if (with_suffix(prefix, ".parts") / "state.json").is_file():
        raise CppmegaError(
            "data-unfinished",
            f"{prefix} is still being prepared, or its preparation was stopped.",
            "Its files may be replaced or completed while it is read.",
            "run the same scripts/prepare_data.py again: it resumes where it was stopped",
        )
    header = index_file.read_header(index)
    index_file.check_ends(header, data.stat().st_size)
    tokens = data.stat().st_size // header.token_bytes
    if tokens == 0:
        raise index_file.broken(prefix, "it holds no tokens")
    card = read_card(prefix)
    found = Corpus(prefix, tokens, header, card)
    if card is not None:
        _refuse_other_card(found, card)
    return found


def _refuse_other_card(found: Corpus, card: Card) -> None:
    there = (found.tokens, found.documents, found.dtype)
    if (card.tokens, card.documents, card.dtype) != there:
        raise index_file.broken(
            found.prefix,
            f"its card is of {card.tokens} tokens in {card.documents} documents as {card.dtype}, "
            f"the index of {found.tokens} in {found.documents} as {found.dtype}",
        )


def check_ids(found: Corpus, vocab_size: int) -> None:
    """Whether the tokens at both ends of a dataset are ids of the vocabulary.

    Raises:
        CppmegaError: `token-out-of-vocabulary`.
    """
    import numpy as np

    look = min(_LOOK, found.tokens)
    for begin in dict.fromkeys((0, found.tokens - look)):
        at = begin * found.index.token_bytes
        with index_file.readable(found.data_file):
            part = np.fromfile(found.data_file, dtype=found.dtype, count=look, offset=at)
        if len(part) < look:
            raise index_file.broken(found.data_file, "it became shorter while it was read")
        for which in (int(np.argmax(part)), int(np.argmin(part))):
            check_id(found, int(part[which]), begin + which, vocab_size)


def check_id(found: Corpus, token: int, position: int, vocab_size: int) -> None:
    """Whether one token is an id of the vocabulary.

    Raises:
        CppmegaError: `token-out-of-vocabulary`.
    """
    if 0 <= token < vocab_size:
        return
    wider = f"--set vocab_size={token + 1} or more and the tokenizer that made it, or "
    raise CppmegaError(
        "token-out-of-vocabulary",
        f"{found.data_file} holds token {token} at position {position}; the vocabulary has the "
        f"ids 0 to {vocab_size - 1}.",
        "The embedding has no row for it, or a row of the padding that belongs to no token.",
        (wider if token >= 0 else "") + "data made with the model's tokenizer",
    )


def check_width(found: Corpus, vocab_size: int) -> None:
    """Whether the type of the ids holds the whole vocabulary: numpy wraps those that do not fit.

    Raises:
        CppmegaError: `data-type-too-narrow`.
    """
    if vocab_size > _HIGHEST[found.dtype]:
        raise CppmegaError(
            "data-type-too-narrow",
            f"{found.prefix} holds its tokens as {found.dtype}; the tokenizer has {vocab_size} "
            "ids.",
            "Ids that do not fit have been stored as other ones, and no longer show.",
            "prepare the data again, or name the tokenizer that made it with --tokenizer",
        )


def digest(prefix: Path) -> tuple[str, str]:
    """SHA-256 of the data file and of the index."""
    found = []
    for suffix in (".bin", ".idx"):
        with with_suffix(prefix, suffix).open("rb") as file:
            found.append(hashlib.file_digest(file, "sha256").hexdigest())
    return found[0], found[1]


def with_suffix(prefix: Path, suffix: str) -> Path:
    """A prefix may hold dots: nothing of it is replaced."""
    return prefix.with_name(prefix.name + suffix)
