"""The projects whose source code makes up the corpus.

The shipped list is `sources.toml`. Each entry pins one archive of sources by its hash, so that the
corpus is the same whenever and wherever it is built.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cppmega.errors import CppmegaError

SHIPPED = Path(__file__).with_name("sources.toml")
Part = Literal["train", "heldout"]
PARTS: tuple[Part, ...] = ("train", "heldout")


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One project."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of its distribution on the package index."""
    version: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+!-]*$")]
    license: Annotated[str, msgspec.Meta(min_length=1)]
    """SPDX expression for the project's own code."""
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    """Hash of its source archive."""
    part: Part
    leave_out: tuple[str, ...] = ()
    """Patterns of paths below the top folder, as of `fnmatch`: code of other projects."""

    @property
    def folder(self) -> str:
        """The folder in which its files are stored."""
        return f"{self.part}/{self.name}-{self.version}"


class _Listing(msgspec.Struct, forbid_unknown_fields=True):
    source: list[Source]


def load(path: Path = SHIPPED) -> tuple[Source, ...]:
    """Read a list of projects: those for training first, each part in the order of the file.

    Raises:
        CppmegaError: `data-list-broken`.
    """
    try:
        sources = msgspec.toml.decode(path.read_bytes(), type=_Listing).source
    except (OSError, ValueError) as error:
        raise _broken(path, str(error)) from None
    twice = [name for name, count in Counter(one.name for one in sources).items() if count > 1]
    if twice:
        raise _broken(path, f"it lists {', '.join(twice)} more than once")
    for part in PARTS:
        if all(source.part != part for source in sources):
            raise _broken(path, f"it has no project for {part}")
    return tuple(sorted(sources, key=lambda source: PARTS.index(source.part)))


def _broken(path: Path, problem: str) -> CppmegaError:
    return CppmegaError(
        "data-list-broken",
        f"{path} is not a list of projects: {problem}",
        "The corpus consists of the projects in it, and of no others.",
        "correct the file; the shipped sources.toml shows its form",
    )
