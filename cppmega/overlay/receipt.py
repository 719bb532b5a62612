"""The receipt: what was applied to a tree, as JSON next to the patched packages.

`ROOT/.cppmega/` holds `receipt.json`, `originals/<sha256>` (the pristine bytes of every patched
file), the lock and, while a transaction runs, `journal.json` and `unfinished`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from cppmega.errors import CppmegaError
from cppmega.tree.installed import Tree, sha256

FOLDER = ".cppmega"
SCHEMA = 2
"""1 had a digest that left out the kernels and modules that patched text runs."""

_LASTING = {"identity", "megatron", "gates", "excluded", "only", "catalogues", "pages", "files"}
"""Fields that are read of a receipt of any later schema."""


class Prints(msgspec.Struct, frozen=True):
    """Fingerprints of one target."""

    before: str
    after: str
    """`runtime` where nothing is written to disk."""


class PatchedFile(msgspec.Struct, frozen=True):
    """One file: hashes before and after, and which page revisions it went through."""

    before: str
    after: str
    origin: str
    steps: list[str]
    """`page@revision` in the order in which the edits were made."""
    inserted: str = ""
    """Hash of the imports and helpers that were inserted before the targets."""
    runs: dict[str, str] = {}
    """Modules of this package that the new text imports, and all that these reach -> hash."""


class PatchedPage(msgspec.Struct, frozen=True):
    """One page as it was applied."""

    revision: str
    state: str
    kind: str
    targets: dict[str, Prints]
    text: str = ""
    """Hash of the page's files, comments included."""
    reached: dict[str, str] = {}
    """Modules of this package that the page imports -> hash."""


class ProvedPage(msgspec.Struct, frozen=True):
    """The result of the last `cppmega verify` of a page."""

    proof: str
    revision: str
    digest: str
    detail: str = ""


class Receipt(msgspec.Struct):
    """The result of one apply."""

    tool: str = ""
    engine: str = ""
    identity: str = ""
    megatron: str = ""
    digest: str = ""
    pages: dict[str, PatchedPage] = {}
    files: dict[str, PatchedFile] = {}
    gates: dict[str, str] = {}
    excluded: list[str] = []
    """Pages taken out by `revert NAME` or left out by `--only`."""
    only: list[str] = []
    """The pages of `--only`; empty: every page."""
    catalogues: list[str] = []
    catalogue_hashes: dict[str, str] = {}
    """Catalogue -> hash of its contents, without which it is not loaded again."""
    stack: dict[str, str] = {}
    proofs: dict[str, ProvedPage] = {}
    survey: dict[str, str] = {}
    code: dict[str, Any] = {}
    """Facts about the code of pages and modules, by the hashes of their files."""

    def dump(self) -> bytes:
        """The bytes of the JSON file."""
        whole = {"schema": SCHEMA, **msgspec.to_builtins(self)}
        return (json.dumps(whole, indent=1) + "\n").encode()


class Written(NamedTuple):
    """Hashes of a file before and after one of our writes."""

    before: str
    after: str


def folder(tree: Tree) -> Path:
    """The folder of the overlay's own files."""
    return tree.root / FOLDER


def refuse_link(tree: Tree) -> None:
    """Stop where one of the overlay's own files is a link: it would be read and written elsewhere.

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
    except (msgspec.MsgspecError, ValueError) as error:
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
    """Decode a receipt.

    Raises:
        msgspec.MsgspecError: it is torn, or a field is not of its type.
    """
    return _parse(data)[0]


class _Schema(msgspec.Struct):
    schema: Annotated[int, msgspec.Meta(ge=1)]
    pages: msgspec.Raw
    """Every receipt has pages and files: without them it is not one."""
    files: msgspec.Raw
    tool: msgspec.Raw = msgspec.Raw(b'""')


def _parse(data: bytes) -> tuple[Receipt, str]:
    """A receipt, and what its reader must be told where it is of another schema."""
    outer = msgspec.json.decode(data, type=_Schema)
    if outer.schema == SCHEMA:
        return msgspec.json.decode(data, type=Receipt), ""
    if outer.schema < SCHEMA:
        return msgspec.json.decode(data, type=Receipt), (
            "the receipt was written by an earlier cppmega, and its digest does not cover the "
            "kernels and modules that the patches run: `cppmega apply` writes a new one"
        )
    # Fields that this version does not know the meaning of are not used. The originals are kept in
    # the same place by every version.
    raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    lasting = {key: value for key, value in raw.items() if key in _LASTING}
    tool = msgspec.json.decode(outer.tool)
    return msgspec.json.decode(msgspec.json.encode(lasting), type=Receipt), (
        f"the receipt was written by a newer cppmega ({tool}, schema {outer.schema}): "
        "only what it says of pages and files is used"
    )


def original(tree: Tree, digest: str | None) -> bytes | None:
    """The kept pristine bytes with that hash, None where they are missing or damaged."""
    if not digest:
        return None
    try:
        data = (folder(tree) / "originals" / digest).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return data if sha256(data) == digest else None
