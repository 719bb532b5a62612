"""Reconstruct a lost receipt from the kept originals and the pages.

Originals are kept under the hash of their bytes, and the wheel or the commit shows which hash is
upstream's. If the pages turn such an original into exactly the bytes on disk, the file was patched
by an apply. A file that was edited since is not claimed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.overlay import plan as planning
from cppmega.overlay import receipt
from cppmega.overlay.compute import rewritten
from cppmega.overlay.diagnose import contains_patch
from cppmega.overlay.receipt import Loaded, PatchedFile, Receipt
from cppmega.page import Page
from cppmega.tree.installed import Tree, sha256


class RestoredTree(Tree):
    """A tree as it would be with some files restored."""

    def __init__(self, root: Path, files: Mapping[str, bytes]) -> None:
        super().__init__(root)
        self._files = files

    def read(self, path: str) -> bytes | None:
        return self._files[path] if path in self._files else super().read(path)


def recovered(tree: Tree, loaded: Loaded, pages: Mapping[str, Page]) -> Loaded:
    """Add to an empty receipt the files that only an apply can have written.

    Assumes that every page was applied with the gates of this environment. If other gates were set
    or pages were left out, the bytes differ and nothing is claimed.
    """
    if loaded.receipt.files:
        return loaded
    kept: dict[str, bytes] = {}
    for path in sorted({edit.path for page in pages.values() for edit in page.patch.edits}):
        if contains_patch(tree.read(path)):
            original = receipt.original(tree, tree.pristine(path)[1])
            if original is not None:
                kept[path] = original
    if not kept:
        return loaded
    restored = RestoredTree(tree.root, kept)
    files: dict[str, PatchedFile] = {}
    try:
        plan = planning.make(restored, Loaded(Receipt()), pages, environment=os.environ)
        for path, original in kept.items():
            data = rewritten(plan, path).data if path in plan.work else original
            if data == tree.read(path):
                origin, steps = tree.pristine(path)[0], plan.work[path].page_revisions
                files[path] = PatchedFile(sha256(original), sha256(data), origin, steps)
    except CppmegaError:  # the verbs report what is wrong with the pages or the gates
        return loaded
    return Loaded(Receipt(files=files), loaded.problem, loaded.exists)
