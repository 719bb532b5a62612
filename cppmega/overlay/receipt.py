"""The receipt: what was applied to a tree, as JSON beside the patched packages.

`ROOT/.cppmega/` holds `receipt.json`, `originals/<sha256>` (the pristine bytes of every patched
file), the lock and, while a transaction runs, `journal.json` and `unfinished`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from cppmega.errors import CppmegaError
from cppmega.tree.installed import Tree, sha256

FOLDER = ".cppmega"
SCHEMA = 2
"""1 had a digest that left out the kernels and modules that patched text runs."""


_LASTING = {"identity", "megatron", "gates", "excluded", "only", "catalogues", "pages", "files"}
"""What a receipt of any later schema is read for."""


@dataclass(frozen=True, slots=True)
class PatchedFile:
    """One file: hashes before and after, and which page revisions it went through."""

    before: str
    after: str
    origin: str
    steps: list[str]
    """`page@revision` in the order in which the edits were made."""
    inserted: str = ""
    """Hash of the imports and helpers that were put in front of the targets."""
    runs: dict[str, str] = field(default_factory=dict)
    """Modules of this package that the new text imports, and all that these reach -> hash."""


@dataclass(frozen=True, slots=True)
class PatchedPage:
    """One page as it was applied."""

    revision: str
    state: str
    kind: str
    targets: dict[str, dict[str, str]]
    """Target -> {"before": fingerprint, "after": fingerprint}."""
    text: str = ""
    """Hash of the page's files, comments included."""
    reached: dict[str, str] = field(default_factory=dict)
    """Modules of this package that the page imports -> hash."""


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
    only: list[str] = field(default_factory=list)
    """What `--only` asked for; empty: every page was asked for."""
    catalogues: list[str] = field(default_factory=list)
    catalogue_hashes: dict[str, str] = field(default_factory=dict)
    """Catalogue -> hash of its contents, without which it is not loaded again."""
    stack: dict[str, str] = field(default_factory=dict)
    proofs: dict[str, dict[str, str]] = field(default_factory=dict)
    """Page -> {"proof", "revision", "digest", "detail"}, written by `cppmega verify`."""
    survey: dict[str, str] = field(default_factory=dict)
    code: dict[str, Any] = field(default_factory=dict)
    """What is known of the code of pages and modules, by the hashes of their files."""

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
        if os.path.islink(kept):  # noqa: PTH114 (no error where the folder may not be entered)
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
        CppmegaError: `linked-receipt`, `receipt-is-a-folder`.
    """
    refuse_link(tree)
    data = tree.read(f"{FOLDER}/receipt.json")
    if data is None:
        _refuse_folder(folder(tree) / "receipt.json")
        return Loaded(Receipt())
    try:
        receipt, problem = _parse(data)
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
            code=receipt.code,
        )
        said = (
            f"the receipt was written for another installation (megatron-core {receipt.megatron})"
        )
        return Loaded(kept, said, True)
    return Loaded(receipt, problem, True)


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise CppmegaError(
            "receipt-is-a-folder",
            f"{path} is a folder, and the receipt must be there.",
            "What was applied to this tree cannot be read, nor written.",
            f"mv {path} {path}.moved; then `python -m cppmega.apply_patches`",
        )


def parse(data: bytes) -> Receipt:
    """JSON bytes to a receipt; raises ValueError, TypeError or KeyError on anything odd."""
    return _parse(data)[0]


def _parse(data: bytes) -> tuple[Receipt, str]:
    """A receipt, and what must be said of it where it is of another schema."""
    raw: dict[str, Any] = json.loads(data)
    schema = raw.pop("schema")
    if type(schema) is not int or schema < 1:
        raise ValueError(f"its schema is {schema!r}")
    problem = ""
    if schema > SCHEMA:
        # Of what we do not know nothing is used. The originals lie where they always did.
        problem = (
            f"the receipt was written by a newer cppmega ({raw.get('tool')}, schema {schema}): "
            "only what it says of pages and files is used"
        )
        raw = {key: value for key, value in raw.items() if key in _LASTING}
    elif schema < SCHEMA:
        problem = (
            "the receipt was written by an earlier cppmega, and its digest does not cover the "
            "kernels and modules that the patches run: `cppmega apply` writes a new one"
        )
    whole = schema <= SCHEMA
    raw["pages"] = {name: _made(PatchedPage, page, whole) for name, page in raw["pages"].items()}
    raw["files"] = {path: _made(PatchedFile, file, whole) for path, file in raw["files"].items()}
    receipt: Receipt = _made(Receipt, raw, whole)
    for name, proof in receipt.proofs.items():
        if not isinstance(proof, dict) or not {"proof", "revision", "digest"} <= set(proof):
            raise TypeError(f"the proof of {name} is torn")
    return receipt, problem


_TYPES = {kind: get_type_hints(kind) for kind in (PatchedFile, PatchedPage, Receipt)}


def _made(kind: type[Any], raw: dict[str, Any], whole: bool) -> Any:
    """An entry from its JSON, every field of its type.

    Args:
        whole: a field that we do not know is an error.
    """
    types = _TYPES[kind]
    made = kind(**{key: value for key, value in raw.items() if whole or key in types})
    for field_ in fields(kind):
        wanted = get_origin(types[field_.name]) or types[field_.name]
        if not isinstance(getattr(made, field_.name), wanted):
            raise TypeError(f"{field_.name} is no {wanted.__name__}")
    return made


def original(tree: Tree, digest: str | None) -> bytes | None:
    """The kept pristine bytes with that hash, None where they are missing or damaged."""
    if not digest:
        return None
    try:
        data = (folder(tree) / "originals" / digest).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return data if sha256(data) == digest else None
