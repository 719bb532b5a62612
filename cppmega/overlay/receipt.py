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
from cppmega.host import json_text
from cppmega.tree.installed import Tree, sha256

FOLDER = ".cppmega"
SCHEMA = 2
"""The digest of schema 1 does not cover the kernels and modules that patched text runs."""

_LASTING = {
    *("identity", "megatron", "gates", "excluded", "only", "kinds"),
    *("catalogues", "pages", "files", "served"),
}
"""Fields that are read from a receipt of any later schema."""


class Prints(msgspec.Struct, frozen=True):
    """Fingerprints of one target."""

    before: str
    after: str
    """`runtime` where nothing is written to disk."""


class PatchedFile(msgspec.Struct, frozen=True):
    """One file: its hashes before and after, and the page revisions that edited it."""

    before: str
    after: str
    origin: str
    steps: list[str]
    """`page@revision` in the order in which the edits were applied."""
    inserted: str = ""
    """Hash of the imports and helpers that were inserted before the targets."""
    runs: dict[str, str] = {}
    """Modules of this package that the new text reaches -> hash."""


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
    environment: dict[str, str] = {}
    """The variables that it ran with; empty: by an earlier cppmega, with those of its shell."""


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
    """Pages removed by `revert NAME`, or left out by `--only`, `--without` or `--kind`."""
    only: list[str] = []
    """The pages of `--only`; empty: every page."""
    kinds: list[str] = []
    """What pages must be, by `--kind`; empty: anything, but see `Page.only_where_asked`."""
    served: dict[str, str] = {}
    """Pages that an earlier apply has applied and this one has not, although nobody left them out
    by name -> the version of megatron-core then."""
    catalogues: list[str] = []
    catalogue_hashes: dict[str, str] = {}
    """Catalogue -> hash of its contents; it is loaded again only if they still match."""
    stack: dict[str, str] = {}
    proofs: dict[str, ProvedPage] = {}
    survey: dict[str, str] = {}
    code: dict[str, Any] = {}
    """Facts about the code of pages and modules, by the hashes of their files."""

    @property
    def once_applied(self) -> dict[str, str]:
        """Every page that this or an earlier apply has applied -> the version of megatron-core."""
        return {**self.served, **dict.fromkeys(self.pages, self.megatron)}

    def dump(self) -> bytes:
        """The bytes of the JSON file."""
        fields = {"schema": SCHEMA, **msgspec.to_builtins(self)}
        return (json.dumps(fields, indent=1) + "\n").encode()


class Written(NamedTuple):
    """Hashes of a file before and after one write."""

    before: str
    after: str


def folder(tree: Tree) -> Path:
    """The folder of the overlay's own files."""
    return tree.root / FOLDER


def refuse_link(tree: Tree) -> None:
    """Refuse links among the overlay's own files, which would be read and written elsewhere.

    Raises:
        CppmegaError: `linked-receipt`.
    """
    place = folder(tree)
    for kept in (place, place / "originals", place / "receipt.json", place / "journal.json"):
        if os.path.islink(kept):  # noqa: PTH114 (no error where the folder may not be entered)
            raise CppmegaError(
                "linked-receipt",
                f"{kept} is a link to {kept.readlink()}.",
                "The receipt and the originals would be read from, and written to, a place that "
                "someone else chose.",
                f"inspect its target, remove the link, then python -m cppmega.apply_patches "
                f"--megatron {tree.root}",
            )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A receipt as found, and what is wrong with it."""

    receipt: Receipt
    problem: str = ""
    """Why the file on disk is used only in part or not at all; empty if it is used as it is."""
    exists: bool = False


def load(tree: Tree) -> Loaded:
    """Read the receipt of a tree; one that is torn or belongs to another tree counts as missing.

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
        # Fields that depend only on content hashes are valid for any tree.
        kept = Receipt(
            engine=receipt.engine,
            files=receipt.files,
            catalogues=receipt.catalogues,
            catalogue_hashes=receipt.catalogue_hashes,
            survey=receipt.survey,
            code=receipt.code,
            served=receipt.once_applied,
        )
        problem = (
            f"the receipt was written for another installation (megatron-core {receipt.megatron})"
        )
        return Loaded(kept, problem, True)
    return Loaded(receipt, problem, True)


def refuse_missing(loaded: Loaded, root: Path | None, where: str = "") -> None:
    """Refuse a tree without a receipt that can be used.

    Args:
        loaded: what `load` has found.
        root: the tree.
        where: text before what happened, such as host and rank.

    Raises:
        CppmegaError: `no-receipt`.
    """
    if not loaded.exists or loaded.problem:
        raise CppmegaError(
            "no-receipt",
            f"{where}{loaded.problem or 'No patches were applied'} in {root}.",
            "Nothing proves that the patches are in the code that trains.",
            "python -m cppmega.apply_patches",
        )


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise CppmegaError(
            "receipt-is-a-folder",
            f"{path} is a folder, but the receipt is a file of that name.",
            "What was applied to this tree can be neither read nor recorded.",
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
    """Required, as `files` is: every receipt has both."""
    files: msgspec.Raw
    tool: msgspec.Raw = msgspec.Raw(b'""')


def _parse(data: bytes) -> tuple[Receipt, str]:
    """Decode a receipt; the text warns the user if its schema is another one."""
    outer = json_text.decode(data, _Schema)
    if outer.schema == SCHEMA:
        return msgspec.json.decode(data, type=Receipt), ""
    if outer.schema < SCHEMA:
        return msgspec.json.decode(data, type=Receipt), (
            "the receipt was written by an earlier cppmega, and its digest does not cover the "
            "kernels and modules that the patches run: `cppmega apply` writes a new one"
        )
    # Fields whose meaning this version does not know are ignored. Every version keeps the originals
    # in the same place.
    raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    lasting = {key: value for key, value in raw.items() if key in _LASTING}
    tool = msgspec.json.decode(outer.tool)
    return msgspec.json.decode(msgspec.json.encode(lasting), type=Receipt), (
        f"the receipt was written by a newer cppmega ({tool}, schema {outer.schema}): "
        "only its pages and files are used"
    )


def original(tree: Tree, digest: str | None) -> bytes | None:
    """Read the pristine bytes kept under a hash; None if they are missing or damaged."""
    if not digest:
        return None
    try:
        data = (folder(tree) / "originals" / digest).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return data if sha256(data) == digest else None
