"""`cppmega new`: write a page to start from, complete but for what only its author knows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cppmega.authoring import similar
from cppmega.catalogue import loader as catalogue
from cppmega.errors import CppmegaError, suggestion
from cppmega.overlay import receipt
from cppmega.overlay.diagnose import view
from cppmega.overlay.survey import MISSING, Survey
from cppmega.page import Edit, Page
from cppmega.tree.installed import Tree
from cppmega.tree.resolve import label_of

TARGET = re.compile(r"[\w/]+\.py:[A-Za-z_][\w.]*(#\d+)?\Z")
_NO_TARGET = "megatron/core/TODO.py:TODO"
"""A page without a target is `absent` on every tree: it stops apply until it names one."""


def default_folder() -> Path:
    """Our own catalogue in a checkout; else a folder of the user's own."""
    builtin = catalogue.builtin_folder()
    checkout = (builtin.parent / "pyproject.toml").is_file()
    return builtin if checkout else Path("patches")


def new(
    name: str,
    folder: Path,
    targets: Sequence[str],
    tree: Tree | None,
    pages: Mapping[str, Page],
) -> Path:
    """Write a page that passes the header law; what is left to do in it is marked TODO.

    Args:
        tree: where the targets' texts are read; None where no target is given.
        pages: the catalogue, for names and symbols that are taken.

    Raises:
        CppmegaError: `bad-name`, `page-exists`, `bad-target`, `target-absent`, `target-ambiguous`,
            `law-header`.
    """
    if not re.match(r"[a-z][a-z0-9_]*\Z", name):
        raise CppmegaError(
            "bad-name",
            f"{name!r} is not snake_case.",
            "The file's name is the patch's name, and a module's.",
            f"cppmega new {re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_') or 'my_patch'}",
        )
    path = folder / f"{name}.py"
    taken = next((p for p in (path, folder / name) if p.exists()), None)
    if taken is not None or name in pages:
        raise CppmegaError(
            "page-exists",
            f"There is a page {name} already: {taken or pages[name].path}.",
            "It would be lost.",
            f"cppmega explain {name}, or choose another name",
        )
    pins = {target: _fingerprint(tree, target) for target in targets} if tree else {}
    label = label_of(tree) if tree else ""
    text = page_text(list(pins.items()), label, _earlier(targets, pages))
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("x") as file:
        file.write(text)
    try:
        catalogue.load_page(name, path, str(folder))
    except CppmegaError:
        path.unlink()
        raise
    return path


def _fingerprint(tree: Tree, target: str) -> str:
    """The fingerprint of upstream's text of a target, patched here or not."""
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
            f"There is no {target} in megatron-core {tree.version}." + suggestion(near),
            "A page pins a text, and there is none.",
            f"--target {near[0]}" if near else "cppmega new NAME, and fill in the target later",
        )
    if text.startswith(("?", "!")):
        said = f"is defined {text[1:]} times" if text.startswith("?") else f"fails: {text[1:]}"
        raise CppmegaError(
            "target-ambiguous",
            f"{target} {said}.",
            "An edit must change exactly one definition.",
            "name the class or the function around it",
        )
    return text


def _earlier(targets: Sequence[str], pages: Mapping[str, Page]) -> list[str]:
    """Pages that edit one of the symbols already: ours must say that it comes after them."""
    return sorted(
        name
        for name, page in pages.items()
        if any(edit.target in targets for edit in page.patch.edits)
    )


def page_text(pins: Sequence[tuple[str, str]], version: str, after: Sequence[str] = ()) -> str:
    """The text of a new page.

    Args:
        pins: target and fingerprint of each symbol; none: placeholders.
    """
    rows = list(pins) or [(_NO_TARGET, "0" * 16)]
    names = ["TARGET"] if len(rows) == 1 else [f"TARGET_{n}" for n in range(1, len(rows) + 1)]
    constants = "\n".join(_constant(n, target) for n, (target, _) in zip(names, rows, strict=True))
    edits = "".join(
        _EDIT.format(name=name, version=version or "0.0.0", pin=pin)
        for name, (_, pin) in zip(names, rows, strict=True)
    )
    feature = "".join(f"{name}, " for name in names).strip()
    feature = feature if len(names) == 1 else feature.rstrip(",")
    told = _AFTER.format(names="".join(f'"{name}", ' for name in after).strip()) if after else ""
    return _PAGE.format(
        constants=constants,
        edits=edits,
        feature=f"({feature})," if pins else "(),  # TODO: the target, once there is one",
        after=told,
        name=names[0],
    )


def _constant(name: str, target: str) -> str:
    line = f'{name} = "{target}"'
    return line if len(line) <= 100 else f'{name} = (\n    "{target}"\n)'


_EDIT = """\
        Edit(
            target={name},
            # Version -> fingerprint of the text that is replaced; `cppmega pin` adds versions.
            pins={{"{version}": "{pin}"}},
            # TODO. More ways to edit are in cppmega/edits.py: inserting, body_of, in_order...
            edit=replacing("TODO_what_stands_there", "TODO_what_shall_stand_there"),
        ),
"""
_AFTER = """\
    # These pages edit the same symbol; their edits come first.
    after=({names}),
"""
_PAGE = '''\
"""TODO: one line that says what the user gains.

What: TODO: what the patched code does, in one or two sentences.
Why: TODO: the bug or the cost, with the number, and where it was measured or seen.
Upstream: Not sent: TODO: the reason, or instead of this the link of the pull request or issue.
Remove: TODO: the condition under which this patch must go.
Numerics: changes results: TODO: how; or `none (bitwise)`, or `reorders sums`.
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

{constants}

PATCH = Patch(
    edits=(
{edits}    ),
    # TODO: when must a run pass through the target? startup, forward, backward, save or never.
    reached="forward",
    # Where one of these is missing from Megatron there is nothing to fix.
    feature={feature}
{after})


def fixed_upstream(source: Source) -> bool:
    # TODO: answer from the code, never from a version:
    #     text = source.text({name})
    #     return bool(text) and "the wrong code" not in text
    return False


def verify() -> None:
    # TODO: import the target here, call it with small values and compare what comes out. This
    # must pass on patched code, fail on stock, and fail on a patch that does nothing.
    raise AssertionError("write the proof")
'''
