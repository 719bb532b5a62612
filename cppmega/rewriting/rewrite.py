"""Compute the patched bytes of one file from its pristine bytes and the active pages' edits.

Pure: no file is read or written here. The result is checked to differ from the pristine text only
in the target symbols and in the imports, helpers and marks that belong to them.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import libcst as cst

from cppmega.errors import CppmegaError
from cppmega.host.containment import contained
from cppmega.page import Edit, Page, left_alone
from cppmega.rewriting import (
    code_text,
    codegen,
    fingerprint,
    kernels,
    marks,
    node_edits,
    undefined_names,
)
from cppmega.rewriting.errors import (
    BadEditError,
    EditMismatchError,
    OutsideTargetError,
    TargetError,
    UndefinedNameError,
)
from cppmega.rewriting.inserted import Inserted, reaches
from cppmega.rewriting.source import (
    IMPORT,
    Definition,
    Span,
    Text,
    decode,
    definitions,
    find,
    first_line,
    lines_of,
    parse,
    plain,
    shares_its_lines,
    span,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One edit of one page, in the order in which edits of a symbol compose."""

    page: str
    edit: Edit
    marked: bool
    known: frozenset[str] = frozenset()
    """Fingerprints of every text of the target that the page would edit."""
    launches: bool = False
    """Only marks, in a function that launches the page's kernel."""
    silent: bool = False
    """Leaves the page's name nowhere, not even in a comment."""

    @classmethod
    def of(cls, page: Page, edit: Edit) -> Step:
        """Create the step of a page's edit."""
        same = [e for e in page.patch.edits if e.target == edit.target and e.edit is not left_alone]
        known = frozenset(pin for e in same for pin in e.pins.values())
        return cls(page.name, edit, page.patch.marks(edit), known)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The new bytes, and the fingerprint of each target after all edits."""

    data: bytes
    after: dict[str, str]
    inserted: str
    """Hash of the imports and helpers inserted outside of the targets, without comments."""
    imports: tuple[str, ...]
    """Modules of this package that the new text names."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """Lines of a symbol in the old file, the lines that replace them, the blocks before them."""

    symbol: str
    where: Span
    new: str
    blocks: list[str]


def rewrite(
    data: bytes,
    path: str,
    steps: Sequence[Step],
    parsed: tuple[Text, ast.Module] | None = None,
    *,
    checked: bool = True,
) -> Rewritten:
    """Apply the steps to a file.

    Args:
        parsed: text and syntax tree of the data, if already computed.
        checked: whether the result is checked and described; otherwise only its bytes count.

    Raises:
        CppmegaError: an edit does not fit, does nothing, renames its target, leaves a name
            undefined, or reaches beyond its target.
    """
    text = parsed[0] if parsed else decode(data, path)
    tree = parsed[1] if parsed else parse(text, path)
    steps = _outside_kernels(steps, tree, text, path)
    groups = _by_outermost(steps)
    places = {symbol: locate(tree, text, f"{path}:{symbol}") for symbol in groups}
    _refuse_overlaps(places, groups, path)
    inserted = Inserted(tree, path)
    cuts: list[_Cut] = []
    for symbol, where in sorted(places.items(), key=lambda item: item[1].start):
        source = "".join(text.lines[where.start : where.end])
        new = _edit_slice(source, symbol, groups[symbol], path)
        cuts.append(_Cut(symbol, where, new, _helpers_before(inserted, groups[symbol])))
    imports = inserted.imports((step.page, step.edit) for step in steps)
    body = _spliced(text, tree, cuts, imports)
    result = text.encode(body, path)
    if not checked:
        return Rewritten(result, {}, "", ())
    new_text = decode(result, path)
    edited = {plain(symbol) for symbol in groups}
    new_tree = parse(_outline(text, tree, cuts, imports, edited), path)
    own_imports = code_text.imports_of(new_tree, body) if f"{code_text.PACKAGE}." in body else ()
    places = {
        cut.symbol: _written(cut, groups[cut.symbol][-1], new_text, new_tree, path) for cut in cuts
    }
    places |= {
        step.edit.symbol: locate(new_tree, new_text, step.edit.target)
        for step in steps
        if step.edit.symbol not in places
    }
    after = {step.edit.symbol: _fingerprint_after(step, new_text, places) for step in steps}
    _check(text, tree, new_text, new_tree, path, cuts, groups, inserted, edited, places)
    return Rewritten(result, after, inserted.fingerprint(), own_imports)


def _helpers_before(inserted: Inserted, group: Sequence[Step]) -> list[str]:
    pairs = [(step.page, step.edit) for step in group]
    marked = any(step.marked or step.launches for step in group)
    return inserted.helpers_before(pairs, marked)


def _outside_kernels(
    steps: Sequence[Step], tree: ast.Module, text: Text, path: str
) -> Sequence[Step]:
    """Let the functions that launch a kernel carry the marks that its compiler would refuse.

    Raises:
        CppmegaError: `mark-in-kernel`.
    """
    done, launching = [], []
    for step in steps:
        place = ".".join(filter(None, (step.edit.symbol, step.edit.mark)))
        kernel = kernels.around(tree, text, place) if step.marked else ""
        done.append(replace(step, marked=False) if kernel else step)
        found = kernels.launchers(tree, text, kernel) if kernel else ()
        if kernel and not found:
            raise marks.in_kernel(step.page, kernel)
        for symbol, name in found:
            edit = kernels.before_launches(name, marks.call(step.page))
            launcher = Edit(f"{path}:{symbol}", {}, edit)
            launching.append(Step(step.page, launcher, marked=False, launches=True))
    return [*done, *launching]


def _by_outermost(steps: Sequence[Step]) -> dict[str, list[Step]]:
    """Group steps by symbol; a method of an edited class is in the group of the class."""
    symbols = {step.edit.symbol for step in steps}
    groups: dict[str, list[Step]] = {}
    for step in steps:
        holders = [s for s in symbols if f"{step.edit.symbol}.".startswith(f"{s}.")]
        groups.setdefault(min(holders, key=len), []).append(step)
    return groups


def _refuse_overlaps(
    places: Mapping[str, Span], groups: Mapping[str, Sequence[Step]], path: str
) -> None:
    """Refuse two symbols with common lines, such as two names of one `try` block."""
    for (one, first), (other, second) in pairwise(
        sorted(places.items(), key=lambda item: item[1].start)
    ):
        if second.start < first.end:
            pages = dict.fromkeys(step.page for name in (one, other) for step in groups[name])
            raise TargetError(
                "targets-overlap",
                f"{path}:{one} and {path}:{other}, targets of {', '.join(pages)}, have lines in "
                "common.",
                "One edit would be lost.",
                "name the target alike in both edits, or merge them into one",
            )


def _written(cut: _Cut, step: Step, text: Text, tree: ast.Module, path: str) -> Span:
    """Return the lines of an edited symbol, and of statements that were added next to it."""
    found = find(tree, cut.symbol)
    if len(found) != 1:
        raise _bad_edit(step, f"leaves {len(found)} statements that its target's name fits")
    where = locate(tree, text, f"{path}:{cut.symbol}")
    if isinstance(found[0], Definition):
        return where
    count = len(lines_of(cut.new))
    for start in range(where.start, max(where.start - count, -1), -1):
        if "".join(text.lines[start : start + count]) == cut.new:
            return Span(start, start + count, where.top)
    return where


def locate(tree: ast.Module, text: Text, target: str) -> Span:
    """Return the lines of the one definition or statement that a target names.

    Raises:
        CppmegaError: `target-absent`, `target-ambiguous`, `target-shares-its-lines`.
    """
    found = find(tree, target.partition(":")[2])
    if len(found) != 1:
        raise TargetError(
            "target-ambiguous" if found else "target-absent",
            f"{target} is defined {len(found)} times.",
            "An edit must change exactly one definition or statement.",
            "run `cppmega status`, and compare the file with upstream's",
        )
    where = span(tree, text, found[0])
    if shares_its_lines(text, found[0], where):
        raise TargetError(
            "target-shares-its-lines",
            f"{target} shares a line with other code.",
            "Cutting it out by lines would take that code with it.",
            "give it lines of its own",
        )
    return where


def _edit_slice(source: str, symbol: str, group: Sequence[Step], path: str) -> str:
    """Return the new lines of a symbol."""
    module, node = fingerprint.parse_definition(source, f"{path}:{symbol}")
    for change in (_edited, _marked):
        for step in group:
            node = _within(node, symbol, step, change)
    new = _printed(module, node, wrapped=source.startswith((" ", "\t")))
    ending = source[len(source.rstrip("\r\n")) :]  # libcst drops a last line end of "\r" alone
    return new.rstrip("\r\n") + ending


def _fingerprint_after(step: Step, text: Text, places: Mapping[str, Span]) -> str:
    """Fingerprint of a step's target in the edited file."""
    where = places[step.edit.symbol]
    source = "".join(text.lines[where.start : where.end])
    after = fingerprint.of_source(source)
    if after in step.known | set(step.edit.pins.values()):
        raise _bad_edit(step, "produces a text that it would edit again")
    return after


def _within(
    node: cst.CSTNode, symbol: str, step: Step, change: Callable[[Step, cst.CSTNode], cst.CSTNode]
) -> cst.CSTNode:
    """Change the step's target, which is the node itself or lies inside it."""
    if step.edit.symbol == symbol:
        return change(step, node)
    inner = _below(step, node, step.edit.symbol[len(symbol) + 1 :])
    new: cst.CSTNode = node.deep_replace(inner, change(step, inner))
    return new


def _below(step: Step, node: cst.CSTNode, symbol: str) -> cst.CSTNode:
    """Find a definition inside another; a failure names the page."""
    try:
        return node_edits.below(node, symbol)
    except EditMismatchError as error:
        raise EditMismatchError(error.problem, step.page) from None


def _marked(step: Step, node: cst.CSTNode) -> cst.CSTNode:
    if step.launches or step.silent:
        return node
    if not step.marked:
        return marks.with_comment(node, step.page)
    return marks.with_mark(node, step.page, step.edit)


def _printed(module: cst.Module, node: cst.CSTNode, wrapped: bool) -> str:
    """The lines of an edited symbol."""
    margin = ""
    if wrapped:
        block = cast(cst.IndentedBlock, cast(cst.If, module.body[0]).body)
        margin = block.indent or module.default_indent
    return codegen.text(node, module.default_indent, module.default_newline, margin)


def _edited(step: Step, node: cst.CSTNode) -> cst.CSTNode:
    new, again = _called(step, node)
    if type(new) is not type(node) or _name(new) != _name(node):
        raise _bad_edit(step, "returns something other than its target")
    if again is not new and not new.deep_equals(again):
        raise _bad_edit(step, "returns a different text when it is called again")
    if not node_edits.differ(new, node) and _bare(new) == _bare(node):
        raise _bad_edit(step, "changes nothing")
    return new


def _name(node: cst.CSTNode) -> str:
    return node.name.value if isinstance(node, cst.FunctionDef | cst.ClassDef) else ""


def _bare(node: cst.CSTNode) -> str:
    return fingerprint.bare(codegen.text(node))


def _called(step: Step, node: cst.CSTNode) -> tuple[Any, Any]:
    """Run the edit; twice if it is a page's own, to verify that it is deterministic."""
    edit = step.edit.edit
    try:
        with contained(partial(_bad_edit, step)):
            new = edit(node)
            return new, new if edit.__module__.startswith("cppmega.") else edit(node)
    except BadEditError:
        raise
    except EditMismatchError as error:
        raise EditMismatchError(error.problem, step.page) from None
    except CppmegaError as error:
        raise CppmegaError(
            error.name, f"{step.page}: {error.what}", error.why, error.next
        ) from None


def _bad_edit(step: Step, what: str) -> BadEditError:
    return BadEditError(
        "bad-edit",
        f"The edit of {step.edit.target} in page {step.page} {what}.",
        "A patch that does not do what it declares must not be applied.",
        f"correct the page; `cppmega diff {step.page}` shows the result",
    )


def _spliced(
    text: Text,
    tree: ast.Module,
    cuts: Sequence[_Cut],
    imports: Sequence[str],
    stubs: Mapping[int, tuple[int, str]] | None = None,
) -> str:
    """Return the new text of the file: the old lines with the cuts and the inserted blocks.

    Args:
        stubs: first line of a definition to shorten -> the line after its last, and its stub.
    """
    front: dict[int, list[str]] = {cut.where.top: [] for cut in cuts}
    for cut in cuts:
        front[cut.where.top] += [block.rstrip("\n") + "\n\n\n" for block in cut.blocks]
    front.setdefault(_import_line(tree, min(front)), [])[:0] = [line + "\n" for line in imports]
    replaced = {cut.where.start: (cut.where.end, cut.new) for cut in cuts} | dict(stubs or {})
    pieces: list[str] = []
    at = 0
    while at < len(text.lines):
        pieces += [block.replace("\n", text.newline) for block in front.get(at, ())]
        at, new = replaced.get(at, (at + 1, text.lines[at]))
        pieces.append(new)
    return "".join(pieces)


def _outline(
    text: Text, tree: ast.Module, cuts: Sequence[_Cut], imports: Sequence[str], edited: set[str]
) -> Text:
    """Return the new text with definitions that are not edited as stubs of as many lines.

    They are the old ones, which have been parsed, and most of the text.
    """
    stubs = {}
    pending = [("", definition) for definition in definitions(tree)]
    while pending:
        prefix, definition = pending.pop()
        name = prefix + definition.name
        if name in edited:
            continue
        start, end = first_line(definition, text) - 1, definition.end_lineno or 0
        if any(symbol.startswith(f"{name}.") for symbol in edited):
            pending += [(f"{name}.", inner) for inner in definitions(definition)]
        elif not text.lines[start][: definition.col_offset].strip():
            indentation = text.lines[start][: definition.col_offset]
            stub = f"{indentation}def {definition.name}(): pass"
            stubs[start] = end, stub + text.newline * (end - start)
    return replace(text, lines=(_spliced(text, tree, cuts, imports, stubs),))


def _import_line(tree: ast.Module, limit: int) -> int:
    """The line after the last import before the first definition; at most `limit`."""
    at = 0
    for statement in tree.body:
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if (statement.end_lineno or 0) > limit or isinstance(statement, Definition):
            break
        if isinstance(statement, ast.Import | ast.ImportFrom) or (docstring and at == 0):
            at = statement.end_lineno or 0
    return at


def _check(
    old: Text,
    old_tree: ast.Module,
    new: Text,
    new_tree: ast.Module,
    path: str,
    cuts: Sequence[_Cut],
    groups: Mapping[str, Sequence[Step]],
    extra: Inserted,
    edited: set[str],
    places: Mapping[str, Span],
) -> None:
    """Check that only targets and what belongs to them changed, and all names are defined."""
    pages = ", ".join(dict.fromkeys(step.page for group in groups.values() for step in group))
    left = _rest(old, [cut.where for cut in cuts])
    right = _rest(new, [places[symbol] for symbol in groups])
    for block in [*extra.helpers.values()]:
        right = _without(right, (block.rstrip("\n") + "\n\n\n").replace("\n", new.newline))
    for line in extra.import_lines:
        right = _without(right, line + new.newline)
    if left != right:
        raise OutsideTargetError(
            "edit-reaches-beyond-its-target",
            f"Outside of {', '.join(groups)} the text of {path} would change ({pages}).",
            "Only what a page declares may differ from upstream.",
            "report this: an edit cannot normally do it",
        )
    for symbol in groups:
        beyond = _beyond(symbol, old_tree, new_tree, places[symbol])
        if beyond:
            raise OutsideTargetError(
                "edit-reaches-beyond-its-target",
                f"{path}:{symbol}, patched by {pages}, would reach beyond itself: "
                f"{', '.join(sorted(beyond))}.",
                "Only what a page declares may differ from upstream.",
                "let the edit change its target only; other symbols need edits of their own",
            )
    undefined = undefined_names.undefined(new_tree, edited | set(extra.helpers), path)
    if undefined:
        undefined -= undefined_names.undefined(parse(old, path), edited, path)
    if undefined:
        raise UndefinedNameError(
            "undefined-name",
            f"{path}, patched by {pages}, uses undefined names: {', '.join(sorted(undefined))}.",
            "It would raise a NameError in the middle of training.",
            "declare the import or the helper in the page",
        )


def _beyond(symbol: str, old: ast.Module, new: ast.Module, where: Span) -> set[str]:
    """How the edited symbol reaches beyond itself, where upstream's does not."""
    before, after = find(old, symbol)[0], find(new, symbol)[0]
    if isinstance(before, Definition):
        beyond = reaches(after)
        return beyond - reaches(before) if beyond else beyond
    holder = symbol.rpartition(".")[0].removesuffix(IMPORT)
    scopes: list[Any] = [find(tree, holder)[0] if holder else tree for tree in (old, new)]
    taken = undefined_names.top_level(scopes[0]) | (set() if holder else set(dir(builtins)))
    added = [one for one in scopes[1].body if where.start < one.lineno <= where.end]
    return set[str]().union(*(reaches(one, taken) for one in added)) - reaches(before, taken)


def _rest(text: Text, spans: Sequence[Span]) -> str:
    lines = list(text.lines)
    for where in spans:
        lines[where.start : where.end] = [""] * (where.end - where.start)
    return "".join(lines)


def _without(body: str, block: str) -> str:
    head, found, tail = body.partition(block)
    return head + tail if found else body
