"""The frozen corpus of the CPU smoke run, and the fingerprint of its contents; imports no torch.

Each line of `corpus.txt` is a document: a short phrase of a closed vocabulary. Documents of about
twenty bytes, padded to a multiple of sixteen tokens, leave a third of a pack to padding.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cppmega.host import json_text

TEXT = Path(__file__).with_name("corpus.txt")
_CARD = "card.json"


def documents() -> list[bytes]:
    """The corpus, one document per line."""
    return TEXT.read_bytes().splitlines()


def held_out(document: bytes) -> bool:
    """Whether a document is held out for scoring: one in ten, independently of its place."""
    return hashlib.sha256(document).digest()[0] < 26


def fingerprint(folder: Path) -> str:
    """The fingerprint of the data in a folder, or of what would be built there."""
    try:
        return str(json_text.read(folder / _CARD)["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        built = (folder / "held_out.idx").exists()  # by a version that wrote no card
        return "unknown" if built else digest(documents())


def digest(corpus: list[bytes]) -> str:
    """One hash of all documents, in their order."""
    return hashlib.sha256(b"\0".join(corpus)).hexdigest()[:16]


def write_card(folder: Path, corpus: list[bytes]) -> None:
    """Record in a data folder which corpus it was built from."""
    (folder / _CARD).write_text(json.dumps({"fingerprint": digest(corpus)}) + "\n")
