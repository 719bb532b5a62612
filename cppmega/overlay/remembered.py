"""Catalogues that a receipt remembers, pinned by their contents.

A page is code, and loading it runs it. A folder that was given once by `--patches` may have been
removed since and made again by somebody else: what is there now is loaded only if it is what was
applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.tree.installed import sha256


def pins(folders: Sequence[Path]) -> dict[str, str]:
    """Folder -> hash of every file in it that loading its pages may run or read."""
    return {str(folder): _contents(folder) for folder in folders}


def refuse_changed(folders: Sequence[Path], pinned: Mapping[str, str], root: Path) -> None:
    """Stop before anything of a changed folder is loaded.

    Args:
        pinned: what `pins` said when the catalogues were applied.

    Raises:
        CppmegaError: `catalogue-changed`.
    """
    changed = [folder for folder in folders if folder.is_dir() and not _same(folder, pinned)]
    if changed:
        words = "".join(f" --patches {folder}" for folder in folders)
        raise CppmegaError(
            "catalogue-changed",
            f"{changed[0]} is not what was applied to {root}: its files have changed"
            + (", or an older cppmega did not keep their hash." if not pinned else "."),
            "Its pages are code that would run here, and whoever changed them may be somebody "
            "else than who named the folder.",
            f"look at it; then name it again: python -m cppmega.apply_patches{words}",
        )


def _same(folder: Path, pinned: Mapping[str, str]) -> bool:
    return pinned.get(str(folder)) == _contents(folder)


def _contents(folder: Path) -> str:
    lines = [f"{file.relative_to(folder)} {sha256(file.read_bytes())}" for file in _files(folder)]
    return sha256("\n".join(sorted(lines)).encode())


def _files(folder: Path) -> Iterator[Path]:
    yield from (file for file in folder.glob("*.py") if file.is_file())
    for page in folder.glob("*/__init__.py"):
        for file in page.parent.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file
