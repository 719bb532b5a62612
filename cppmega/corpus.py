"""A prepared dataset on disk, looked at without torch: is it whole, and whose tokens are these?

`PREFIX.bin` and `PREFIX.idx` are Megatron's; `PREFIX.json` is the card that `prepare_data` writes
last, so that a dataset without it is unfinished or somebody else's.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {
    **{1: ("uint8", 1), 2: ("int8", 1), 3: ("int16", 2), 4: ("int32", 4), 5: ("int64", 8)},
    8: ("uint16", 2),
}
_LOOK = 1 << 20
"""Tokens at each end of a dataset whose ids are checked; hashing all of it is for a preflight."""


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
    documents: int
    dtype: str
    card: Card | None
    """None: somebody else's dataset."""


def read_card(prefix: Path) -> Card | None:
    """The card beside a dataset, None where there is none.

    Raises:
        CppmegaError: `data-card-broken`.
    """
    path = with_suffix(prefix, ".json")
    try:
        raw = json.loads(path.read_text())
        raw.pop("fingerprint")
        return Card(**raw)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CppmegaError(
            "data-card-broken",
            f"{path} cannot be read: {error}",
            "It says which tokenizer made the data.",
            f"restore it, or prepare the data again under another name than {prefix}",
        ) from error


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
            "run the same scripts/prepare_data.py again: it goes on where it was stopped"
            if parts.is_dir()
            else f"scripts/prepare_data.py --out {prefix} TEXT..., or correct --data",
        )
    tokens, documents, dtype = _read_index(index, data)
    if tokens == 0:
        raise _broken(prefix, "it holds no tokens")
    card = read_card(prefix)
    if card is not None and (card.tokens, card.dtype) != (tokens, dtype):
        raise _broken(prefix, f"its card speaks of {card.tokens} tokens, the index of {tokens}")
    return Corpus(prefix, tokens, documents, dtype, card)


def _read_index(index: Path, data: Path) -> tuple[int, int, str]:
    """Tokens, documents and type; the data file must be exactly as long as the index says."""
    import numpy as np

    with index.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise _broken(index, "its header is cut off")
        magic, version, code, sequences, documents = _HEADER.unpack(head)
        if magic != _MAGIC or version != 1 or code not in _DTYPES:
            raise _broken(index, "it is no index of a Megatron dataset")
        dtype, size = _DTYPES[code]
        lengths = np.frombuffer(file.read(4 * sequences), dtype=np.int32)
        if len(lengths) < sequences:
            raise _broken(index, "its list of lengths is cut off")
    tokens = int(lengths.sum(dtype=np.int64))
    if data.stat().st_size != tokens * size:
        raise _broken(
            data, f"it has {data.stat().st_size} bytes, the index says {tokens} tokens of {size}"
        )
    return tokens, documents - 1, dtype


def check_ids(corpus: Corpus, vocab_size: int) -> None:
    """Whether the tokens at both ends of a dataset have rows in the embedding.

    Raises:
        CppmegaError: `token-out-of-vocabulary`.
    """
    import numpy as np

    path = with_suffix(corpus.prefix, ".bin")
    data = np.memmap(path, dtype=np.dtype(corpus.dtype), mode="r")
    for part in (data[:_LOOK], data[-_LOOK:]):
        highest, lowest = int(part.max()), int(part.min())
        if highest >= vocab_size or lowest < 0:
            wrong = highest if highest >= vocab_size else lowest
            raise CppmegaError(
                "token-out-of-vocabulary",
                f"{path} holds token {wrong}; the model has rows for 0 to {vocab_size - 1}.",
                "The embedding would read outside of its table: a device-side assert, or noise.",
                f"--set vocab_size={highest + 1} or more, or data made with the model's tokenizer",
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


def _broken(path: Path, what: str) -> CppmegaError:
    return CppmegaError(
        "data-broken",
        f"{path}: {what}.",
        "Samples would be cut at the wrong places, or end in a crash far into the run.",
        "prepare the data again, under another name",
    )
