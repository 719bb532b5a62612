"""A team's own edits of Megatron, accepted by naming file and hash.

A file that differs from upstream's stops a run. An intended edit is declared with the SHA-256 of
the complete file, in a recipe (`accepted_edits`) or as an option (`--accept FILE=SHA256`). It then
becomes part of the digest that identifies the training code, as the patches are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from cppmega.errors import CppmegaError
from cppmega.tree.installed import sha256

Edits = Mapping[str, str]
"""Path relative to ROOT -> SHA-256 of the file."""

_FILE = re.compile(r"\w+(?:/[\w.-]+)+\Z")
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_ACCEPTED: dict[str, str] = {}


def parse(words: Iterable[str]) -> dict[str, str]:
    """Parse the `FILE=SHA256` words of a command line.

    Raises:
        CppmegaError: `bad-accept`.
    """
    return from_pairs(tuple(word.rpartition("=")[::2] for word in words))


def from_pairs(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Check the (file, SHA-256) pairs of a recipe.

    Raises:
        CppmegaError: `bad-accept`.
    """
    edits: dict[str, str] = {}
    for path, digest in pairs:
        if not _FILE.match(path) or ".." in path.split("/") or not _HASH.match(digest):
            raise _bad(f"{path}={digest} does not name a file below ROOT and its SHA-256.")
        if edits.setdefault(path, digest) != digest:
            raise _bad(f"{path} is accepted with two hashes.")
    return edits


def merged(pairs: Iterable[tuple[str, str]], words: Iterable[str]) -> dict[str, str]:
    """Merge the edits that a recipe and the command line accept.

    Raises:
        CppmegaError: `bad-accept`, also if they name one file with two hashes.
    """
    return from_pairs((*pairs, *parse(words).items()))


def accept(edits: Edits) -> None:
    """Accept these edits for the rest of this process.

    Raises:
        CppmegaError: `bad-accept`, if a file was accepted with another hash before.
    """
    _ACCEPTED.update(from_pairs((*_ACCEPTED.items(), *edits.items())))


def in_this_process() -> Edits:
    """The edits that this process has accepted so far."""
    return dict(_ACCEPTED)


def name_of_code(digest: str, edits: Edits, fallbacks: Iterable[str] = ()) -> str:
    """The name of the code that trains.

    Args:
        digest: the overlay's digest.
        edits: the accepted edits, of which the name has a hash.
        fallbacks: pages whose calls Megatron's own code may compute, which the name states.
    """
    if edits:
        lines = (f"{path} {edits[path]}" for path in sorted(edits))
        digest += f"+edits:{sha256(chr(10).join(lines).encode())[:8]}"
    allowed = ",".join(sorted(fallbacks))
    return f"{digest}+fallback:{allowed}" if allowed else digest


def _bad(what: str) -> CppmegaError:
    return CppmegaError(
        "bad-accept",
        what,
        "An accepted edit is one complete file with exactly one content.",
        "--accept megatron/core/FILE.py=SHA256, as `sha256sum FILE.py` prints it in ROOT",
    )
