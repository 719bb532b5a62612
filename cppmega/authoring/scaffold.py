"""`cppmega new`: write a page that is complete except for what only its author knows."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cppmega import edits as edits_module
from cppmega.authoring import similar
from cppmega.authoring.from_commit import Change, Commit
from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError, suggestion
from cppmega.overlay import receipt
from cppmega.overlay.diagnose import view
from cppmega.overlay.survey import MISSING, Survey
from cppmega.page import Edit, Page
from cppmega.rewriting.source import Definition, find
from cppmega.tree.installed import Tree, distribution_of
from cppmega.tree.resolve import label_of

TARGET = re.compile(r"[\w/]+\.py:[A-Za-z_][\w.]*(#\d+)?\Z")
_NO_TARGET = "megatron/core/TODO.py:TODO"
"""A placeholder target. It is `absent` on every tree, so that it stops `apply` until replaced."""


def default_folder() -> Path:
    """Return the shipped catalogue in a checkout, and `./patches` otherwise."""
    builtin = catalogue.builtin_folder()
    checkout = (builtin.parent / "pyproject.toml").is_file()
    return builtin if checkout else Path("patches")


def new(
    name: str,
    folder: Path,
    targets: Sequence[str],
    tree: Tree | None,
    pages: Mapping[str, Page],
    commit: Commit | None = None,
) -> Path:
    """Write a page that passes the header law, and mark what is left to do with TODO.

    Args:
        name: the name of the page.
        folder: the catalogue in which to write it.
        targets: the symbols to patch.
        tree: the tree with the texts of the targets; None if there are no targets. Of a commit,
            a tree whose version is pinned too if its texts are those before the commit.
        pages: the existing catalogue, for names and symbols that are taken.
        commit: take targets, edits and pins from it instead.

    Raises:
        CppmegaError: `bad-name`, `page-exists`, `bad-target`, `target-absent`, `target-ambiguous`,
            `law-header`.
    """
    if not re.match(r"[a-z][a-z0-9_]*\Z", name):
        raise CppmegaError(
            "bad-name",
            f"{name!r} is not snake_case.",
            "The file's name is that of the patch, and that of a module.",
            f"cppmega new {re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_') or 'my_patch'}",
        )
    path = folder / f"{name}.py"
    taken = next((p for p in (path, folder / name) if p.exists()), None)
    if taken is not None or name in pages:
        raise CppmegaError(
            "page-exists",
            f"A page {name} exists already: {taken or pages[name].path}.",
            "It would be overwritten.",
            f"cppmega explain {name}, or choose another name",
        )
    if commit is None:
        changes = (
            [Change(one, _fingerprint(tree, one), mark=_mark(tree, one)) for one in targets]
            if tree
            else []
        )
        rows = [(change, {_label(tree, change.target): change.pin}) for change in changes]
    else:
        changes = commit.changes
        labels = [f"before-{commit.commit[:12]}", *_labels_with(tree, changes)]
        rows = [(change, dict.fromkeys(labels, change.pin)) for change in changes]
    text = page_text(rows, _earlier([change.target for change in changes], pages), commit)
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("x") as file:
        file.write(text)
    try:
        catalogue.load_page(name, path, str(folder))
    except CppmegaError:
        path.unlink()
        raise
    return path


def _labels_with(tree: Tree | None, changes: Sequence[Change]) -> list[str]:
    """The label of a tree if it has all texts of the changes; half of a page must not apply."""
    with suppress(CppmegaError):
        if tree and changes and all(_fingerprint(tree, c.target) == c.pin for c in changes):
            return [_label(tree, changes[0].target)]
    return []


def _owner(tree: Tree, target: str) -> str:
    distribution = distribution_of(target) or "megatron-core"
    return f"{distribution} {tree.version_of(distribution)}"


def _label(tree: Tree | None, target: str) -> str:
    return label_of(tree, distribution_of(target) or "megatron-core") if tree else ""


def _fingerprint(tree: Tree, target: str) -> str:
    """Return the fingerprint of upstream's text of a target, even if it is patched here."""
    if not TARGET.match(target):
        raise CppmegaError(
            "bad-target",
            f"{target!r} is not path.py:Symbol.",
            "Nothing can be looked up.",
            "--target megatron/core/transformer/mlp.py:MLP.forward",
        )
    edit = Edit(target, {}, lambda node: node)
    file = view(tree, receipt.load(tree), edit.path, {})
    text = Survey(tree).fingerprint(file.pristine or file.current, edit)
    if text == MISSING:
        near = similar.similar_names(tree, target)
        raise CppmegaError(
            "target-absent",
            f"There is no {target} in {_owner(tree, target)}." + suggestion(near),
            "A page pins an existing text.",
            f"--target {near[0]}" if near else "cppmega new NAME, and fill in the target later",
        )
    if text.startswith(("?", "!")):
        problem = f"is defined {text[1:]} times" if text.startswith("?") else f"fails: {text[1:]}"
        raise CppmegaError(
            "target-ambiguous",
            f"{target} {problem}.",
            "An edit must change exactly one definition or statement.",
            f"name the class or the function around it, or count: --target '{target}#1'",
        )
    return text


def _mark(tree: Tree, target: str) -> str | None:
    """The mark of an edit: none for a statement, which runs when its file is imported."""
    path, _, symbol = target.partition(":")
    nodes = find(Survey(tree).parse(tree.read(path) or b"", path)[1], symbol)
    return None if isinstance(nodes[0], Definition) else ""


def _earlier(targets: Sequence[str], pages: Mapping[str, Page]) -> list[str]:
    """Return the pages that already edit one of the symbols, and that the new one must follow."""
    return sorted(
        name
        for name, page in pages.items()
        if any(edit.target in targets for edit in page.patch.edits)
    )


def page_text(
    changes: Sequence[tuple[Change, Mapping[str, str]]],
    after: Sequence[str] = (),
    commit: Commit | None = None,
) -> str:
    """Return the text of a new page.

    Args:
        changes: each symbol with its pins; without any, placeholders are written.
        after: the pages that the new one must follow.
        commit: where the changes come from.
    """
    rows = list(changes) or [(Change(_NO_TARGET, ""), {"0.0.0": "0" * 16})]
    names = ["TARGET"] if len(rows) == 1 else [f"TARGET_{n}" for n in range(1, len(rows) + 1)]
    constants = "\n".join(_constant(n, row[0].target) for n, row in zip(names, rows, strict=True))
    edits = "".join(_edit(name, *row) for name, row in zip(names, rows, strict=True))
    following = (
        _AFTER.format(names="".join(f'"{name}", ' for name in after).strip()) if after else ""
    )
    used = sorted({word for word in vars(edits_module) if re.search(rf"\b{word}\(", edits)})
    marked = any(change.mark != "" for change, _ in rows)
    return _PAGE.format(
        constants=constants,
        edits=edits,
        after=following,
        name=names[0],
        used=", ".join(used),
        reached="forward" if marked else "never",
        **_of_commit(commit),
    )


def _of_commit(commit: Commit | None) -> dict[str, str]:
    """What a page has only if it comes from a commit."""
    if commit is None:
        return {"origin": "", "future": "", "definitions": ""}
    left = [f"# TODO: {hunk}" for hunk in commit.left]
    origin = [f"# From commit {commit.commit[:12]}, {commit.subject}", *left]
    texts = "".join(f"\n\n{text}\n" for text in commit.definitions.values())
    return {
        "origin": "\n".join(origin) + "\n\n",
        "future": "from __future__ import annotations\n\n" if texts else "",
        "definitions": texts + "\n" if texts else "",
    }


def _constant(name: str, target: str) -> str:
    line = f'{name} = "{target}"'
    return line if len(line) <= 100 else f'{name} = (\n    "{target}"\n)'


def _edit(name: str, change: Change, pins: Mapping[str, str]) -> str:
    other = distribution_of(change.target)
    more = f'distribution="{other}",\n' if other not in ("", "megatron-core") else ""
    for key, words in (
        ("imports", [f'"{line}"' for line in change.imports]),
        ("helpers", change.helpers),
    ):
        more += f"{key}=({', '.join(words)},),\n" if words else ""
    more += f'mark="{change.mark}",\n' if change.mark is not None else ""
    edit = f"edit={change.edits[0]},\n" if len(change.edits) == 1 else ""
    if len(change.edits) > 1:
        edit = "edit=in_order(\n" + textwrap.indent(",\n".join(change.edits), "    ") + ",\n),\n"
    rows = ", ".join(f'"{version}": "{pin}"' for version, pin in pins.items())
    return _EDIT.format(
        name=name,
        pins=rows,
        edit=textwrap.indent(edit or _TODO_EDIT, " " * 12),
        more=textwrap.indent(more, " " * 12),
    )


_TODO_EDIT = """\
# TODO: cppmega/edits.py has further edits: inserting, body_of, in_order...
edit=replacing("TODO_old_code", "TODO_new_code"),
"""
_EDIT = """\
        Edit(
            target={name},
            # Version -> fingerprint of the replaced text; `cppmega pin` adds versions.
            pins={{{pins}}},
{edit}{more}        ),
"""
_AFTER = """\
    # These pages edit the same symbol; their edits are made first.
    after=({names}),
"""
_PAGE = '''\
"""TODO: the effect for the user, in one line.

What: TODO: what the patched code does, in one or two sentences.
Why: TODO: the bug or the cost, with the number, and where it was measured or seen.
Upstream: Not sent: TODO: the reason; or only the link of the pull request or issue.
Remove: TODO: the condition under which this patch is no longer needed.
Numerics: changes results: TODO: how; or `none (bitwise)`, or `reorders sums`.
"""

{origin}{future}from cppmega.edits import {used}
from cppmega.page import Edit, Patch, Source

{constants}
{definitions}
PATCH = Patch(
    # Or "speed" (the same results sooner), or "feature" (only runs that ask for it change).
    purpose="fix",
    edits=(
{edits}    ),
    # TODO: when must a run pass through the target? startup, forward, backward, save or never.
    reached="{reached}",
    # TODO: what the bug depends on, such as the class of a feature. Where Megatron lacks it, there
    # is nothing to fix. Never the target: if upstream renamed it, the patch would disappear.
    feature=(),
{after})


def fixed_upstream(source: Source) -> bool:
    # TODO: answer from the code, never from a version:
    #     text = source.text({name})
    #     return bool(text) and "the wrong code" not in text
    return False


def verify() -> None:
    # TODO: import the target here, call it with small values and assert what it returns. This
    # must pass on patched code, fail on stock, and fail on a patch that does nothing.
    # cppmega.proof.small_models and cppmega.proof.stand_ins help on a machine without a GPU.
    raise AssertionError("write the proof")
'''
