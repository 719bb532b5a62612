"""Trees of links to the files of other trees, which stay unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from cppmega.tree.installed import PACKAGES, named


def link(source: Path, to: Path, changed: Mapping[str, bytes] | None = None) -> None:
    """Create a folder of links to the files below another one.

    Args:
        changed: files that are written instead: path, beginning with the folder's name -> bytes.
    """
    _link(str(source.absolute()), str(to), changed or {}, source.name)


def join(trees: Iterable[Path], to: Path) -> None:
    """Join several trees into one; a package in more than one of them comes from the first."""
    to.mkdir(parents=True)
    for root in trees:
        for distribution, package in PACKAGES.items():
            if (root / package).is_dir() and not (to / package).exists():
                for folder in (root / package, *_lists(root, distribution)):
                    link(folder, to / folder.name)


def _lists(root: Path, distribution: str) -> Iterator[Path]:
    """The folder with the RECORD of a distribution, if there is one."""
    return (folder for folder in root.glob("*.dist-info") if named(folder)[0] == distribution)


def _link(source: str, to: str, changed: Mapping[str, bytes], prefix: str) -> None:
    Path(to).mkdir(parents=True)
    with os.scandir(source) as entries:  # twice as fast as `iterdir`
        for entry in entries:
            path, place = f"{prefix}/{entry.name}", f"{to}/{entry.name}"
            if entry.is_dir():
                if entry.name != "__pycache__":
                    _link(entry.path, place, changed, path)
            elif path in changed:
                Path(place).write_bytes(changed[path])
            else:
                Path(place).symlink_to(entry.path)
