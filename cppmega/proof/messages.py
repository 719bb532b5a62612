"""The messages between `verify` and the process that runs the proofs, as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Side = Literal["patched", "stock", "mutant"]
"""The code that a proof runs on."""
SIDES: tuple[Side, ...] = ("patched", "stock", "mutant")


class PageOrder(msgspec.Struct, frozen=True):
    """A page as the worker finds it again, with the edits that fit the tree."""

    name: str
    path: str
    catalogue: str
    edits: tuple[int, ...] = ()
    """Indices of edits of the page."""


class FileOrder(msgspec.Struct, frozen=True):
    """A file to patch, and the edits of it in order."""

    path: str
    data: bytes
    edits: tuple[tuple[str, int], ...]
    """Name of the page and index of its edit."""


class TextOrder(msgspec.Struct, frozen=True):
    """Files to patch in memory, in order to compare their texts between processes."""

    pages: tuple[PageOrder, ...]
    files: tuple[FileOrder, ...]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The order of a worker, read on its stdin."""

    root: str
    """The tree that the worker imports."""
    side: Side
    forks: bool
    """Whether every proof gets its own process."""
    pages: tuple[PageOrder, ...]
    texts: TextOrder | None = None
    limit: Annotated[float, msgspec.Meta(gt=0)]
    """Seconds after which a proof is ended."""
    answers: int
    """The file descriptor for the answers."""
    code: dict[str, Any]
    """What the sender knows of the code of the pages, which takes long to find out."""


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first answer: pages and targets are imported."""

    texts: dict[str, str] | None
    """Path -> hash of the patched text, or why there is none; None if no texts were ordered."""


class ProofRun(msgspec.Struct, frozen=True):
    """The result of one proof on one side."""

    result: Literal["passed", "failed", "unable", "not-run"]
    """`unable`: an installed package lacks what the proof uses, so that nothing is shown."""
    detail: str
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    error: str = ""
    """Type of the exception with which the proof failed."""


class Answer(msgspec.Struct, frozen=True):
    """One further answer per page, in the order of the pages."""

    name: str
    run: ProofRun
