"""Every file that the receipt names is byte for byte what was applied."""

from __future__ import annotations

from collections.abc import Iterator

from cppmega.errors import CppmegaError
from cppmega.overlay import foreign_diff, receipt
from cppmega.preflight.context import Context
from cppmega.preflight.findings import refuse
from cppmega.tree.installed import sha256

AFTER: tuple[str, ...] = ("one_root", "receipt_whole")


def check(context: Context) -> str:
    """Hash the files, their kept originals, and compare both with the wheel's RECORD.

    Raises:
        CppmegaError: `file-changed` with the diff, `original-missing`, `receipt-of-other-text`.
    """
    refuse(_changed_files(context))
    return f"{len(context.receipt.files)} files are what was applied"


def _changed_files(context: Context) -> Iterator[CppmegaError]:
    tree = context.session.read_tree()
    for path, entry in context.receipt.files.items():
        origin, wanted = tree.pristine(path)
        if origin != "unverified" and wanted != entry.before:
            yield CppmegaError(
                "receipt-of-other-text",
                f"{path} was patched from a text that the installed "
                f"{'wheel' if origin == 'record' else 'commit'} does not have.",
                "Megatron was changed underneath the patches.",
                "python -m cppmega.apply_patches",
            )
            continue
        now = tree.read(path)
        kept = receipt.original(tree, entry.before)
        if now is not None and sha256(now) == entry.after:
            if kept is None:
                yield CppmegaError(
                    "original-missing",
                    f"The kept original of {path} is gone from {receipt.FOLDER}/originals.",
                    "Nothing can show what the patches changed there, or revert them.",
                    f"{tree.restore(path)}, then python -m cppmega.apply_patches",
                )
            continue
        edit = foreign_diff.difference(context.session, context.receipt, path, kept, now)
        yield CppmegaError(
            "file-changed",
            f"{path} is not what was applied; {edit}",
            "The code there is neither upstream's nor what the patches make of it.",
            f"{tree.restore(path)}, then python -m cppmega.apply_patches",
        )
