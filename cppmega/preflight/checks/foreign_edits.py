"""No file of the installed Megatron was edited or added by hand.

`patched_files` covers the patched ones; every other file is compared with the RECORD of the
distribution that installed it, with the commit of a checkout, or with the accepted edits.
"""

from __future__ import annotations

from collections.abc import Iterator

from cppmega.errors import CppmegaError
from cppmega.guard import files as guarded_files
from cppmega.overlay import foreign_diff
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Remark, refuse
from cppmega.tree.installed import sha256

AFTER: tuple[str, ...] = ("one_root", "receipt_whole")
"""Without the receipt every patched file would count as edited by hand."""


def check(context: Context) -> str:
    """Hash every Python file of Megatron.

    Raises:
        CppmegaError: `file-gone`, `foreign-file`, `accepted-edit-differs`; `foreign-edit`, with
            the diff where upstream's text is available offline.
    """
    unverified: list[str] = []
    known = [path for path in _paths(context) if context.session.read_tree().read(path) is not None]
    refuse(_foreign_files(context, unverified))
    summary = f"{len(known) - len(unverified)} files are upstream's"
    if context.accepted:
        summary += f"; accepted edits: {', '.join(sorted(context.accepted))}"
    if unverified:
        some = ", ".join(unverified[:3])
        summary += f"; {len(unverified)} unverified, in no RECORD and no commit ({some})"
    return Remark(summary) if unverified or context.accepted else summary


def _paths(context: Context) -> list[str]:
    """Files that exist or should, without those that carry our patches."""
    tree = context.session.read_tree()
    recorded = (path for path in tree.recorded if path.endswith(".py"))
    every = dict.fromkeys((*tree.python_files, *recorded, *context.accepted))
    ours = context.receipt.files
    return [path for path in every if path.startswith("megatron/") and path not in ours]


def _foreign_files(context: Context, unverified: list[str]) -> Iterator[CppmegaError]:
    tree = context.session.read_tree()
    for path in _paths(context):
        data = tree.read(path)
        if data is None:
            yield _missing_file(context, path)
            continue
        owner, error = guarded_files.origin(tree, path, data, context.accepted)
        if error is not None and error.name == "foreign-edit":
            pristine = foreign_diff.upstream_text(tree, path)
            edit = foreign_diff.difference(context.session, context.receipt, path, pristine, data)
            error = guarded_files.foreign_edit(tree, path, sha256(data), edit)
        if error is not None:
            yield error
        elif not owner:
            unverified.append(path)


def _missing_file(context: Context, path: str) -> CppmegaError:
    who = "its edit was accepted" if path in context.accepted else "upstream has it"
    return CppmegaError(
        "file-gone",
        f"{path} is missing; {who}.",
        "The first module that imports it ends the run, perhaps at its first checkpoint.",
        context.session.read_tree().restore(path),
    )
