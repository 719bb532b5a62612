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
    """Folder -> one hash of the files that loading its pages may run or read."""
    return {str(folder): _contents(folder) for folder in folders}


def refuse_changed(folders: Sequence[Path], pinned: Mapping[str, str], root: Path) -> None:
    """Refuse changed folders before anything in them is loaded.

    Args:
        pinned: the result of `pins` when the catalogues were applied.

    Raises:
        CppmegaError: `catalogue-changed`.
    """
    changed = [folder for folder in folders if folder.is_dir() and not _same(folder, pinned)]
    if changed:
        words = "".join(f" --patches {folder}" for folder in folders)
        raise CppmegaError(
            "catalogue-changed",
            f"{changed[0]} is not what was applied to {root}: its files have changed"
            + (", or an older cppmega did not record their hash." if not pinned else "."),
            "Its pages are code that would run here, and someone other than the person who named "
            "the folder may have changed them.",
            f"inspect it, then pass it again: python -m cppmega.apply_patches{words}",
        )


def _same(folder: Path, pinned: Mapping[str, str]) -> bool:
    return pinned.get(str(folder)) == _contents(folder)


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
