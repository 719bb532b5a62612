"""A team's own edits of Megatron, accepted by naming file and hash.

Whatever is not upstream's stops a run. An edit that is meant is named with the SHA-256 of the
whole file, in a recipe (`accepted_edits`) or as an option (`--accept FILE=SHA256`). It then belongs
to the name of the training code, as the patches do.
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
    """`FILE=SHA256` words of a command line.

    Raises:
        CppmegaError: `bad-accept`.
    """
    return of(tuple(word.rpartition("=")[::2] for word in words))


def of(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The same for the pairs of a recipe.

    Raises:
        CppmegaError: `bad-accept`.
    """
    found: dict[str, str] = {}
    for path, digest in pairs:
        if not _FILE.match(path) or ".." in path.split("/") or not _HASH.match(digest):
            raise _bad(f"{path}={digest} does not name a file below ROOT and its SHA-256.")
        if found.setdefault(path, digest) != digest:
            raise _bad(f"{path} is accepted with two hashes.")
    return found


def asked(pairs: Iterable[tuple[str, str]], words: Iterable[str]) -> dict[str, str]:
    """What a recipe and the command line accept together.

    Raises:
        CppmegaError: `bad-accept`, also where they name one file with two hashes.
    """
    return of((*pairs, *parse(words).items()))


def accept(edits: Edits) -> None:
    """Let this process train these edits.

    Raises:
        CppmegaError: `bad-accept`, where recipe and option name one file with two hashes.
    """
    _ACCEPTED.update(of((*_ACCEPTED.items(), *edits.items())))


def in_this_process() -> Edits:
    """The edits accepted so far."""
    return dict(_ACCEPTED)


def name_of_code(digest: str, edits: Edits) -> str:
    """The overlay's digest, extended where edits are trained with it."""
    if not edits:
        return digest
    lines = (f"{path} {edits[path]}" for path in sorted(edits))
    return f"{digest}+edits:{sha256(chr(10).join(lines).encode())[:8]}"


def _bad(what: str) -> CppmegaError:
    return CppmegaError(
        "bad-accept",
        what,
        "An edit is accepted as a whole file with one content, and no other file with it.",
        "--accept megatron/core/FILE.py=SHA256, as `sha256sum FILE.py` prints it in ROOT",
    )
