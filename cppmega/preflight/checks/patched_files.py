"""Every file that the receipt names is what was applied, and no stale bytecode takes its place.

The code in a `.pyc` that Python would trust is compared with what the source compiles to.
"""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.guard import expected, modules
from cppmega.overlay import foreign_diff, receipt
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Problems
from cppmega.tree.installed import sha256

AFTER: tuple[str, ...] = ("one_root", "receipt_whole")
APART: tuple[str, ...] = ("stale-bytecode",)


def check(context: Context) -> Problems:
    """Hash the files and their kept originals, and compare both with the wheel's RECORD.

    Yields:
        `file-changed` with the diff, `original-missing`, `receipt-of-other-text`,
        `stale-bytecode`.
    """
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
        if now is None or sha256(now) != entry.after:
            edit = foreign_diff.difference(context.session, context.receipt, path, kept, now)
            yield CppmegaError(
                "file-changed",
                f"{path} is not what was applied; {edit}",
                "The code there is neither upstream's nor what the patches make of it.",
                f"{tree.restore(path)}, then python -m cppmega.apply_patches",
            )
            continue
        if kept is None:
            yield CppmegaError(
                "original-missing",
                f"The kept original of {path} is gone from {receipt.FOLDER}/originals.",
                "Nothing can show what the patches changed there, or revert them.",
                f"{tree.restore(path)}, then python -m cppmega.apply_patches",
            )
        source = tree.root / path
        if stale := expected.of_source(source, now).stale:
            yield modules.stale_bytecode(stale, str(source))
    return f"{len(context.receipt.files)} files are what was applied, without stale bytecode"
