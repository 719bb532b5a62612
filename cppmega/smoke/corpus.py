"""The corpus of the CPU smoke run, and the name of its contents; imports no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cppmega.catalogue.loader import builtin_folder

_CARD = "card.json"


def paragraphs() -> list[bytes]:
    """The corpus: the paragraphs of this package's and its catalogue's sources."""
    files = sorted([*Path(__file__).parent.glob("*.py"), *builtin_folder().glob("*.py")])
    found = []
    for file in files:
        for block in file.read_bytes().split(b"\n\n"):
            text = block.strip(b"\n")
            if len(text) >= 8:
                found.append(text)
    return found


def fingerprint(folder: Path) -> str:
    """Of the data in a folder, or of what would be built there."""
    try:
        return str(json.loads((folder / _CARD).read_text())["fingerprint"])
    except (OSError, ValueError, KeyError):
        built = (folder / "held_out.idx").exists()  # by a cppmega that left no card
        return "unknown" if built else of(paragraphs())


def of(documents: list[bytes]) -> str:
    """One hash of a corpus."""
    return hashlib.sha256(b"\0".join(documents)).hexdigest()[:16]


def write_card(folder: Path, documents: list[bytes]) -> None:
    """Say in the folder what it was built from: our sources change, a built corpus does not."""
    (folder / _CARD).write_text(json.dumps({"fingerprint": of(documents)}) + "\n")
