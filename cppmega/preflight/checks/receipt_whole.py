"""No transaction on the tree is open, and the content of its receipt matches its digest."""

from __future__ import annotations

import fcntl
import os

from cppmega.errors import CppmegaError
from cppmega.overlay import receipt, transaction
from cppmega.overlay.compute import overlay_digest
from cppmega.preflight.context import Context

AFTER: tuple[str, ...] = ("one_root",)


def check(context: Context) -> str:
    """Look for a held lock and a journal, read the receipt, and compute its digest again.

    Raises:
        CppmegaError: `being-patched`, `leftover-journal`, `no-receipt`, `receipt-changed`.
    """
    tree = context.session.read_tree()
    folder = receipt.folder(tree)
    if _held(folder / "lock"):
        raise CppmegaError(
            "being-patched",
            f"Another process holds {folder / 'lock'}: it is patching this tree now.",
            "Ranks would import some files from before it and some from after.",
            "wait for it, then run the preflight again",
        )
    marks = ("journal.json", transaction.UNFINISHED)
    left = [name for name in marks if (folder / name).exists()]
    if left:
        files = ", ".join(sorted(transaction.interrupted(tree))[:5]) or "no file yet"
        raise CppmegaError(
            "leftover-journal",
            f"An apply or revert was killed in {folder} ({', '.join(left)}); it was writing "
            f"{files}.",
            "Some files may be patched and others not.",
            "python -m cppmega.apply_patches (it finishes or undoes that transaction)",
        )
    loaded = receipt.load(tree)
    applied = loaded.receipt
    receipt.refuse_missing(loaded, context.session.root)
    digest = overlay_digest(applied)
    if digest != applied.digest:
        raise CppmegaError(
            "receipt-changed",
            f"The receipt states overlay {applied.digest}; its content is {digest}.",
            "It was edited by hand or cut short, and does not describe the code on disk.",
            "python -m cppmega.apply_patches",
        )
    return f"overlay {digest}, {len(applied.pages)} patches in {len(applied.files)} files"


def _held(lock: os.PathLike[str]) -> bool:
    try:
        handle = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
