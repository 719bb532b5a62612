"""The card of a corpus of source code: what it was built from, and what it contains.

It contains neither times nor paths: the same archive and the same versions give the same card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from cppmega.data.corpus import Card, StructureRecord
from cppmega.data.tokenizers import TokenizerRecord
from tools.code_corpus.archive import Manifest, Project
from tools.code_corpus.listing import PARTS
from tools.code_corpus.selection import LINE, LINES, MOST_SEEN
from tools.markdown import table

_TITLES = {"train": "training", "heldout": "held out"}
_LANGUAGES = {"c": "C", "cpp": "C++ and headers", "python": "Python"}


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One of its datasets."""

    fingerprint: str
    documents: int
    tokens: int
    """The ends of documents included."""
    bytes: int
    """Bytes of its documents."""
    structure: StructureRecord
    share: float
    """Part of the tokens whose kind is not 0, the ends of documents left out."""


class CodeCard(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a corpus."""

    command: str
    archive: str
    """SHA-256 of the file."""
    archive_bytes: int
    content: str
    """SHA-256 over the names and hashes of its files."""
    tokenizer: TokenizerRecord
    packages: dict[str, str]
    """Package -> version, for the package that trains the tokenizer and for the grammars."""
    parts: dict[str, PartRecord]
    projects: list[Project]
    schema: int = 1

    def markdown(self) -> str:
        """The card as a page."""
        return "\n".join(_page(self)) + "\n"


def part_record(card: Card, projects: Iterable[Project]) -> PartRecord:
    """The part of a corpus's record that describes one of its datasets."""
    if card.structure is None or card.structure.share is None:
        raise ValueError("the dataset has no structure ids")
    return PartRecord(
        fingerprint=card.fingerprint,
        documents=card.documents,
        tokens=card.tokens,
        bytes=sum(sum(project.bytes.values()) for project in projects),
        structure=card.structure,
        share=round(card.structure.share, 4),
    )


def of_part(manifest: Manifest, part: str) -> list[Project]:
    """The projects of a part."""
    return [project for project in manifest.projects if project.source.part == part]


def _page(card: CodeCard) -> Iterable[str]:
    train, heldout = (card.parts[part] for part in PARTS)
    yield "# A corpus of source code: C, C++ and Python"
    yield ""
    yield (
        f"{train.tokens:,} tokens for training and {heldout.tokens:,} held out by project, from "
        f"{len(card.projects)} projects; {train.share:.1%} of the training tokens have a kind of "
        "structure."
    )
    yield ""
    yield (
        f"No two documents have the same text. Of a document with {LINES} or more lines of at "
        f"least {LINE} bytes, at most {MOST_SEEN['train']:.0%} of them stand in documents before "
        f"it, and at most {MOST_SEEN['heldout']:.0%} if it is held out; those held out come after "
        "those for training."
    )
    yield ""
    yield table(("", *_TITLES.values()), _summary(train, heldout))
    yield ""
    yield f"Made with `{card.command}`, from an archive of {card.archive_bytes / 1e6:.1f} MB:"
    yield ""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(card.packages.items()))
    yield table(
        ("", ""),
        [
            ("archive, SHA-256", f"`{card.archive}`"),
            ("its content", f"`{card.content}`"),
            (
                "tokenizer",
                f"byte-level BPE of {card.tokenizer.vocab_size:,} entries, trained on the "
                f"training part; nothing is drawn at random; the token {card.tokenizer.eod} ends a "
                "document",
            ),
            ("`tokenizer.json`, SHA-256", f"`{card.tokenizer.sha256}`"),
            ("definition of the structure", str(train.structure.definition)),
            ("versions", versions),
        ],
    )
    for part in PARTS:
        yield from _projects(part, [one for one in card.projects if one.source.part == part])
    yield from _left_out(card.projects)


def _summary(*parts: PartRecord) -> list[tuple[str, ...]]:
    rows = [
        ("fingerprint", *(f"`{part.fingerprint}`" for part in parts)),
        ("documents", *(f"{part.documents:,}" for part in parts)),
        ("bytes", *(f"{part.bytes:,}" for part in parts)),
        ("tokens, ends of documents included", *(f"{part.tokens:,}" for part in parts)),
        ("bytes a token", *(f"{part.bytes / part.tokens:.2f}" for part in parts)),
        ("tokens that have a kind", *(f"{part.share:.1%}" for part in parts)),
    ]
    names = sorted({name for part in parts for name in part.structure.tokens})
    for name in names:
        cells = (
            f"{part.structure.documents.get(name, 0):,} documents, "
            f"{part.structure.tokens.get(name, 0):,} tokens"
            for part in parts
        )
        rows.append((_LANGUAGES.get(name, name), *cells))
    return rows


def _projects(part: str, projects: Sequence[Project]) -> Iterable[str]:
    yield ""
    yield f"## Projects: {_TITLES[part]}"
    yield ""
    rows = []
    for project in projects:
        source = project.source
        sizes = (f"{project.bytes.get(name, 0) / 1e6:.2f}" for name in _LANGUAGES)
        total = str(sum(project.documents.values()))
        rows.append((source.name, source.version, source.license, total, *sizes))
    heads = (f"{title}, MB" for title in _LANGUAGES.values())
    yield table(("project", "version", "license", "documents", *heads), rows)


def _left_out(projects: Iterable[Project]) -> Iterable[str]:
    counted = Counter[str]()
    for project in projects:
        counted.update(project.left_out)
    yield ""
    yield "## Files left out"
    yield ""
    yield table(
        ("reason", "files"), [(reason, f"{count:,}") for reason, count in counted.most_common()]
    )
