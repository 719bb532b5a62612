"""Nobody edited any other file of the installed Megatron by hand.

The patched files are `patched_files`'s; here every file is compared with the wheel's RECORD, or
with the commit of a checkout.
"""

from __future__ import annotations

from collections.abc import Iterator

from cppmega import planted
from cppmega.check import Context, NotApplicable, Remark, refuse
from cppmega.errors import CppmegaError

AFTER: tuple[str, ...] = ("one_root", "receipt_whole")
"""Without the receipt every patched file would pass for edited by hand."""


def check(context: Context) -> str:
    """Hash every Python file of Megatron.

    Raises:
        CppmegaError: `file-gone`; `foreign-edit`, with the diff where upstream's text can be had
            offline.
        NotApplicable: nobody vouches for the files of this tree.
    """
    tree = context.session.tree
    ours = set(context.receipt.files)
    known, added, wrong = 0, [], []
    for path in tree.python_files:
        if not path.startswith("megatron/") or path in ours:
            continue
        if tree.vouched(path):
            known += 1
        elif tree.pristine(path)[0] == "unverified":
            added.append(path)
        else:
            wrong.append(path)
    gone = [path for path in tree.recorded if path.endswith(".py") and tree.read(path) is None]
    wrong += [path for path in gone if path.startswith("megatron/") and path not in ours]
    if not known and not wrong:
        raise NotApplicable("neither a RECORD nor a commit vouches for the files of this tree")
    refuse(_errors(context, wrong))
    if added:
        more = f"{len(added)} are not upstream's ({', '.join(added[:3])})"
        return Remark(f"{known} files are upstream's; {more}")
    return f"{known} files are upstream's"


def _errors(context: Context, paths: list[str]) -> Iterator[CppmegaError]:
    tree = context.session.tree
    for path in paths:
        pristine = planted.upstream_text(tree, path)
        if tree.read(path) is None:
            yield CppmegaError(
                "file-gone",
                f"{path} is gone; upstream has it.",
                "Whatever imports it late ends the run there, perhaps at its first checkpoint.",
                planted.restore(tree, path),
            )
            continue
        yield CppmegaError(
            "foreign-edit",
            f"{path} differs from upstream's; "
            + planted.difference(context, path, pristine, tree.read(path)),
            "The run would train somebody's edit that no receipt, log or checkpoint names.",
            f"{planted.restore(tree, path)}; or make the edit a page: cppmega new NAME",
        )
