"""Environments with some of the distributions that are installed here, and no others."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def required(*names: str) -> set[str]:
    """Distributions and what they require here, directly or through others."""
    found, pending = set[str](), [Requirement(name) for name in names]
    while pending:
        one = pending.pop()
        try:
            needs = map(Requirement, metadata.requires(one.name) or ())
        except metadata.PackageNotFoundError:
            continue  # of another machine
        if one.name in found and not one.extras:
            continue
        found.add(one.name)
        extras = [{"extra": extra} for extra in ("", *one.extras)]
        pending += [
            need for need in needs if not need.marker or any(map(need.marker.evaluate, extras))
        ]
    return found


def link(names: Iterable[str], site: Path) -> None:
    """Put links to the files of distributions into a folder of packages."""
    installed = (file for name in names for file in metadata.files(name) or ())
    for top in {file.parts[0] for file in installed if ".." not in file.parts}:
        (site / top).symlink_to(next(Path(p, top) for p in sys.path if Path(p, top).exists()))
