"""The tree has a receipt, and its content matches its digest."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.overlay import receipt
from cppmega.overlay.compute import overlay_digest
from cppmega.preflight.context import Context

AFTER: tuple[str, ...] = ("one_root", "being_patched")


def check(context: Context) -> str:
    """Read it, and compute its digest again.

    Raises:
        CppmegaError: `no-receipt`, `receipt-changed`.
    """
    loaded = receipt.load(context.session.read_tree())
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
