"""The receipt: what was applied to a tree, as JSON beside the patched packages.

`ROOT/.cppmega/` holds `receipt.json`, `originals/<sha256>` (the pristine bytes of every patched
file), the lock and, while a transaction runs, `journal.json` and `unfinished`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.tree import Tree, sha256

FOLDER = ".cppmega"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class PatchedFile:
    """One file: hashes before and after, and which page revisions it went through."""

    before: str
    after: str
    origin: str
    steps: list[str]
    """`page@revision` in the order in which the edits were made."""


@dataclass(frozen=True, slots=True)
class PatchedPage:
    """One page as it was applied."""

    revision: str
    state: str
    kind: str
    targets: dict[str, dict[str, str]]
    """Target -> {"before": fingerprint, "after": fingerprint}."""


@dataclass
class Receipt:
    """What one apply did."""

    tool: str = ""
    engine: str = ""
    identity: str = ""
    megatron: str = ""
    digest: str = ""
    pages: dict[str, PatchedPage] = field(default_factory=dict)
    files: dict[str, PatchedFile] = field(default_factory=dict)
    gates: dict[str, str] = field(default_factory=dict)
    excluded: list[str] = field(default_factory=list)
    """Pages taken out by `revert NAME` or left out by `--only`."""
    catalogues: list[str] = field(default_factory=list)
    catalogue_hashes: dict[str, str] = field(default_factory=dict)
    """Catalogue -> hash of its contents, without which it is not loaded again."""
    stack: dict[str, str] = field(default_factory=dict)
    proofs: dict[str, dict[str, str]] = field(default_factory=dict)
    """Page -> {"proof", "revision", "digest", "detail"}, written by `cppmega verify`."""
    survey: dict[str, str] = field(default_factory=dict)

    def dump(self) -> bytes:
        """The bytes of the JSON file."""
        return (json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n").encode()


def folder(tree: Tree) -> Path:
    """Where the overlay keeps its things."""
    return tree.root / FOLDER


def refuse_link(tree: Tree) -> None:
    """Stop where what we keep is a link: reading and writing would go where it points.

    Raises:
        CppmegaError: `linked-receipt`.
    """
    place = folder(tree)
    for kept in (place, place / "originals", place / "receipt.json", place / "journal.json"):
        if kept.is_symlink():
            raise CppmegaError(
                "linked-receipt",
                f"{kept} is a link to {kept.readlink()}.",
                "Receipt and originals would be read from, and written to, a place of somebody "
                "else's choice.",
                f"look at what it points to, remove the link, then python -m cppmega.apply_patches "
                f"--megatron {tree.root}",
            )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A receipt as found, and what is wrong with it."""

    receipt: Receipt
    problem: str = ""
    """Empty; or why the file on disk was not used: the receipt is then a new, empty one."""
    exists: bool = False


def load(tree: Tree) -> Loaded:
    """Read the receipt of a tree. A torn one, or another tree's, is as good as none.

    Raises:
        CppmegaError: `linked-receipt`.
    """
    refuse_link(tree)
    data = tree.read(f"{FOLDER}/receipt.json")
    if data is None:
        return Loaded(Receipt())
    try:
        receipt = parse(data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return Loaded(Receipt(), f"the receipt cannot be read ({error})", True)
    if receipt.identity != tree.identity:
        # What depends on hashes of contents only holds for any tree.
        kept = Receipt(
            engine=receipt.engine,
            files=receipt.files,
            catalogues=receipt.catalogues,
            catalogue_hashes=receipt.catalogue_hashes,
            survey=receipt.survey,
        )
        said = (
            f"the receipt was written for another installation (megatron-core {receipt.megatron})"
        )
        return Loaded(kept, said, True)
    return Loaded(receipt, "", True)


def parse(data: bytes) -> Receipt:
    """JSON bytes to a receipt; raises ValueError, TypeError or KeyError on anything odd."""
    raw: dict[str, Any] = json.loads(data)
    if raw.pop("schema") != SCHEMA:
        raise ValueError("it has another schema")
    raw["pages"] = {name: PatchedPage(**page) for name, page in raw["pages"].items()}
    raw["files"] = {path: PatchedFile(**entry) for path, entry in raw["files"].items()}
    receipt = Receipt(**raw)
    empty = Receipt()
    for field_ in fields(Receipt):
        value, wanted = getattr(receipt, field_.name), type(getattr(empty, field_.name))
        if not isinstance(value, wanted):
            raise TypeError(f"{field_.name} is no {wanted.__name__}")
    for name, proof in receipt.proofs.items():
        if not isinstance(proof, dict) or not {"proof", "revision", "digest"} <= set(proof):
            raise TypeError(f"the proof of {name} is torn")
    return receipt


def original(tree: Tree, digest: str | None) -> bytes | None:
    """The kept pristine bytes with that hash, None where they are missing or damaged."""
    if not digest:
        return None
    try:
        data = (folder(tree) / "originals" / digest).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return data if sha256(data) == digest else None
