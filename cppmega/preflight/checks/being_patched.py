"""No transaction on the tree is open or unfinished."""

from __future__ import annotations

import fcntl
import os

from cppmega.errors import CppmegaError
from cppmega.overlay import transaction
from cppmega.overlay.receipt import folder
from cppmega.preflight.context import Context

AFTER: tuple[str, ...] = ("one_root",)


def check(context: Context) -> str:
    """Look for a journal and for a held lock.

    Raises:
        CppmegaError: `being-patched`, `leftover-journal`.
    """
    tree = context.session.read_tree()
    if _held(folder(tree) / "lock"):
        raise CppmegaError(
            "being-patched",
            f"Another process holds {folder(tree) / 'lock'}: it is patching this tree now.",
            "Ranks would import some files from before it and some from after.",
            "wait for it, then run the preflight again",
        )
    marks = ("journal.json", transaction.UNFINISHED)
    left = [name for name in marks if (folder(tree) / name).exists()]
    if left:
        files = ", ".join(sorted(transaction.interrupted(tree))[:5]) or "no file yet"
        raise CppmegaError(
            "leftover-journal",
            f"An apply or revert was killed in {folder(tree)} ({', '.join(left)}); it was writing "
            f"{files}.",
            "Some files may be patched and others not.",
            "python -m cppmega.apply_patches (it finishes or undoes that transaction)",
        )
    return "no transaction is open"


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
