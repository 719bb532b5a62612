"""Tokenizers that prepare data: bytes, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from cppmega.errors import CppmegaError
from cppmega.host import json_text

if TYPE_CHECKING:
    import numpy as np

BYTES = 256
"""Ids of the byte tokenizer below its end-of-document token."""


class TokenizerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a tokenizer, as a dataset's card keeps it."""

    kind: str = ""
    vocab_size: Annotated[int, msgspec.Meta(ge=1)]
    eod: Annotated[int, msgspec.Meta(ge=0)]
    """Id of the token that ends a document."""
    sha256: str = ""
    """Hash of the tokenizer's file; empty for bytes."""

    @property
    def digest(self) -> str:
        """One hash of all of it, for records that belong to the tokens that it makes."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    def __post_init__(self) -> None:
        if self.eod >= self.vocab_size:
            raise ValueError(
                f"its tokenizer ends a document with id {self.eod}, and has ids below "
                f"{self.vocab_size}"
            )


@dataclass(frozen=True, slots=True)
class Placed:
    """The tokens of one document, and where they are in it."""

    ids: list[int]
    begins: np.ndarray[Any, Any]
    """First byte of each token, int64. A character that is split over tokens belongs to each."""
    ends: np.ndarray[Any, Any]
    """The byte after its last, int64; a token that represents no text is empty."""


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Every byte is a token: nothing has to be downloaded, and everything can be encoded."""

    vocab_size: int = BYTES + 1
    eod: int = BYTES

    def encode(self, documents: Sequence[bytes]) -> list[list[int]]:
        """The bytes themselves."""
        return [list(document) for document in documents]

    def encode_placed(self, documents: Sequence[bytes]) -> list[Placed]:
        """The bytes themselves, each at its place."""
        import numpy as np

        at = [np.arange(len(document) + 1) for document in documents]
        ids = self.encode(documents)
        return [Placed(one, own[:-1], own[1:]) for one, own in zip(ids, at, strict=True)]

    def describe(self) -> TokenizerRecord:
        """Kind and sizes."""
        return TokenizerRecord(kind="byte", vocab_size=self.vocab_size, eod=self.eod)


class HuggingFaceTokenizer:
    """A `tokenizer.json`, read by the package tokenizers; transformers is not needed."""

    def __init__(self, path: Path, eod: str | None = None) -> None:
        """Load the tokenizer.

        Args:
            path: the file, or a folder that holds it.
            eod: the token that ends a document; default: the end token its configuration names.

        Raises:
            CppmegaError: `input-not-found`, `package-missing`, `tokenizer-broken`,
                `no-end-token`.
        """
        self.file = path / "tokenizer.json" if path.is_dir() else path
        if not self.file.is_file():
            raise CppmegaError(
                "input-not-found",
                f"There is no tokenizer file {self.file}.",
                "Without it the text cannot become tokens.",
                "--tokenizer byte, or the path of a tokenizer.json or of its folder",
            )
        try:
            package: Any = importlib.import_module("tokenizers")
        except ImportError:
            raise not_installed(f"It reads {self.file.name}.") from None
        try:
            self._tokenizer = package.Tokenizer.from_file(str(self.file))
        except Exception as error:  # the package raises bare Exception
            raise CppmegaError(
                "tokenizer-broken",
                f"{self.file} is not a tokenizer: {error}",
                "Without it the text cannot become tokens.",
                "use a tokenizer.json that the package tokenizers saved",
            ) from error
        # The number of tokens is not enough: added tokens may leave gaps before them.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        name = eod or _end_token(self.file.parent)
        end = self._tokenizer.token_to_id(name) if name else None
        if end is None:
            raise CppmegaError(
                "no-end-token",
                f"{self.file} "
                + (
                    f"has no token {name!r}." if name else "does not state which token ends a text."
                ),
                "Documents would run together.",
                "--eod TOKEN names it, for example --eod '<|endoftext|>'",
            )
        self.eod = int(end)

    def encode(self, documents: Sequence[bytes]) -> list[list[int]]:
        """Ids of each document, on all threads; UnicodeDecodeError if one is not a text."""
        return [list(one.ids) for one in self._encodings(documents)]

    def encode_placed(self, documents: Sequence[bytes]) -> list[Placed]:
        """Ids of each document with the places that the tokenizer itself gives them."""
        encodings = self._encodings(documents)
        return [
            _placed(list(one.ids), one.offsets, document)
            for one, document in zip(encodings, documents, strict=True)
        ]

    def _encodings(self, documents: Sequence[bytes]) -> list[Any]:
        texts = [document.decode() for document in documents]
        encodings: list[Any] = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return encodings

    def describe(self) -> TokenizerRecord:
        """Kind, sizes, and the hash of the file."""
        return TokenizerRecord(
            kind="huggingface",
            vocab_size=self.vocab_size,
            eod=self.eod,
            sha256=hashlib.sha256(self.file.read_bytes()).hexdigest(),
        )


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def load(name: str, eod: str | None = None) -> Tokenizer:
    """Load a tokenizer by its name, `byte` or a path.

    Raises:
        CppmegaError: what `HuggingFaceTokenizer` raises.
    """
    return ByteTokenizer() if name == "byte" else HuggingFaceTokenizer(Path(name), eod)


def not_installed(needed: str) -> CppmegaError:
    """The error where the package tokenizers is missing.

    Args:
        needed: a sentence about what it would do.
    """
    return CppmegaError(
        "package-missing",
        "The package tokenizers is missing.",
        needed,
        "pip install tokenizers, or use --tokenizer byte",
    )


def _placed(ids: list[int], offsets: Sequence[tuple[int, int]], document: bytes) -> Placed:
    """Convert places in characters, as the package counts them, into places in bytes."""
    import numpy as np

    of_bytes = np.frombuffer(document, np.uint8)
    characters = np.append(np.flatnonzero((of_bytes & 0xC0) != 0x80), len(document))
    begins, ends = characters[np.array(offsets, np.int64).reshape(-1, 2)].T
    # GPT-2's tokenizer counts no blank before a word, so a token of blanks is empty, at its end.
    previous = np.concatenate(([0], ends[:-1]))
    return Placed(ids, np.where(begins == ends, np.minimum(previous, begins), begins), ends)


def _end_token(folder: Path) -> str | None:
    """The end token that the files next to a tokenizer name."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            value = json_text.read(folder / file).get("eos_token")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            return value
    return None
