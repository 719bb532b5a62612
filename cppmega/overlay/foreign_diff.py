"""The diff between a file that was edited by hand and the text that it should have."""

from __future__ import annotations

import difflib

from cppmega.errors import CppmegaError
from cppmega.overlay import plan as planning
from cppmega.overlay import receipt
from cppmega.overlay.compute import rewritten
from cppmega.overlay.receipt import Receipt
from cppmega.overlay.recovery import RestoredTree
from cppmega.overlay.verbs import Session
from cppmega.tree import wheels
from cppmega.tree.installed import Tree, distribution_of, sha256

_LINES = 40
"""The most lines of a diff that a message shows."""


def difference(
    session: Session, applied: Receipt, path: str, pristine: bytes | None, now: bytes | None
) -> str:
    """Describe an edit, with a diff if the expected text is available.

    Args:
        path: the file, relative to ROOT.
        pristine: upstream's text; the patched text is computed from it where pages edit the file.
        now: the bytes of the file.
    """
    if now is None:
        return "the file is gone."
    if pristine is None:
        return "the edit cannot be shown, as this machine has no copy of upstream's text."
    wanted = _as_applied(session, applied, path, pristine)
    if wanted is None:
        return "the edit cannot be shown, as these pages do not reproduce the patched text."
    lines = list(
        difflib.unified_diff(
            wanted.decode(errors="replace").splitlines(),
            now.decode(errors="replace").splitlines(),
            f"a/{path}",
            f"b/{path}",
            lineterm="",
            n=1,
        )
    )
    if not lines and wanted != now:
        return "only line endings, or bytes that are not UTF-8, differ."
    more = [f"... and {len(lines) - _LINES} more lines"] if len(lines) > _LINES else []
    return "the edit:\n" + "\n".join(lines[:_LINES] + more)


def upstream_text(tree: Tree, path: str) -> bytes | None:
    """The bytes that RECORD or the commit vouches for, if they are on this machine."""
    _, wanted = tree.pristine(path)
    kept = receipt.original(tree, wanted) or tree.git_blob(path)
    if kept is not None:
        return kept
    distribution = distribution_of(path) or "megatron-core"
    try:
        unpacked = wheels.place_of(tree.version_of(distribution), distribution)
        data = (unpacked / path).read_bytes()
    except OSError:
        return None
    return data if sha256(data) == wanted else None


def _as_applied(session: Session, applied: Receipt, path: str, pristine: bytes) -> bytes | None:
    """Compute the text of a file with the receipt's pages; None if it cannot be reproduced."""
    if path not in applied.files:
        return pristine
    here = session.read_tree()
    # A page that edits several files is applied to none of them unless it finds all of them.
    texts = {other: upstream_text(here, other) for other in applied.files}
    known = {other: text for other, text in texts.items() if text is not None}
    tree = RestoredTree(here.root, known | {path: pristine})
    try:
        plan = planning.make(
            tree,
            receipt.Loaded(Receipt()),
            session.pages,
            excluded=dict.fromkeys(set(session.pages) - set(applied.pages), "not applied"),
            environment=applied.gates,
        )
        data = rewritten(plan, path).data
    except (CppmegaError, KeyError):
        return None
    return data if sha256(data) == applied.files[path].after else None
