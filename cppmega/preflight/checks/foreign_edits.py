"""No file of the installed Megatron was edited or added by hand.

`patched_files` covers the patched ones; every other file is compared with the RECORD of the
distribution that installed it, with the commit of a checkout, or with the accepted edits.
"""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.guard import files as guarded_files
from cppmega.overlay import foreign_diff
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Problems, Remark
from cppmega.tree.installed import sha256

AFTER: tuple[str, ...] = ("one_root", "receipt_whole")
"""Without the receipt every patched file would count as edited by hand."""


def check(context: Context) -> Problems:
    """Hash every Python file of Megatron that does not carry our patches.

    Yields:
        `file-gone`, `foreign-file`, `accepted-edit-differs`; `foreign-edit`, with the diff where
        upstream's text is available offline.
    """
    tree, accepted = context.session.read_tree(), context.accepted
    upstreams, unverified = 0, []
    recorded = (path for path in tree.recorded if path.endswith(".py"))
    for path in dict.fromkeys((*tree.python_files, *recorded, *accepted)):
        if not path.startswith("megatron/") or path in context.receipt.files:
            continue
        data = tree.read(path)
        if data is None:
            yield CppmegaError(
                "file-gone",
                f"{path} is missing; "
                f"{'its edit was accepted' if path in accepted else 'upstream has it'}.",
                "The first module that imports it ends the run, perhaps at its first checkpoint.",
                tree.restore(path),
            )
            continue
        owner, error = guarded_files.origin(tree, path, data, accepted)
        if error is not None and error.name == "foreign-edit":
            pristine = foreign_diff.upstream_text(tree, path)
            edit = foreign_diff.difference(context.session, context.receipt, path, pristine, data)
            error = guarded_files.foreign_edit(tree, path, sha256(data), edit)
        if error is not None:
            yield error
        elif owner:
            upstreams += 1
        else:
            unverified.append(path)
    summary = f"{upstreams} files are upstream's"
    if accepted:
        summary += f"; accepted edits: {', '.join(sorted(accepted))}"
    if unverified:
        some = ", ".join(unverified[:3])
        summary += f"; {len(unverified)} unverified, in no RECORD and no commit ({some})"
    return Remark(summary) if unverified or accepted else summary
