"""Catalogues that a receipt remembers, pinned by their contents.

Loading a page runs its code. A folder that was once passed as `--patches` may since have been
replaced by someone else, so it is loaded only if its contents are those that were applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError
from cppmega.tree.installed import sha256


def pins(folders: Sequence[Path]) -> dict[str, str]:
    """Folder, or name if installed -> one hash of what loading its pages may run or read."""
    return {catalogue.stored(folder): _contents(folder) for folder in folders}


def refuse_changed(pinned: Mapping[str, str], root: Path) -> None:
    """Refuse changed catalogues before anything in them is loaded.

    Args:
        pinned: the result of `pins` when they were applied; an empty hash was not recorded.

    Raises:
        CppmegaError: `catalogue-changed`.
    """
    there = {name: catalogue.located(name) for name in pinned}
    changed = [n for n, at in there.items() if at.is_dir() and _contents(at) != pinned[n]]
    if changed:
        words = "".join(f" --patches {name}" for name in changed)
        raise CppmegaError(
            "catalogue-changed",
            f"{changed[0]} is not what was applied to {root}: its files have changed"
            + ("." if pinned[changed[0]] else ", or an older cppmega did not record their hash."),
            "Its pages are code that would run here, and someone other than the person who named "
            "the folder may have changed them.",
            f"inspect it, then pass it again: python -m cppmega.apply_patches{words}",
        )


def _contents(folder: Path) -> str:
    lines = [f"{file.relative_to(folder)} {sha256(file.read_bytes())}" for file in _files(folder)]
    return sha256("\n".join(sorted(lines)).encode())


def _files(folder: Path) -> Iterator[Path]:
    for home in catalogue.folders(folder):
        yield from (file for file in home.glob("*.py") if file.is_file())
        for page in home.glob("*/__init__.py"):
            for file in page.parent.rglob("*"):
                if file.is_file() and "__pycache__" not in file.parts:
                    yield file
