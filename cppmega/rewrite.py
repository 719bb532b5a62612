"""One file's pristine bytes and the edits of the active pages -> the patched bytes, checked.

Pure: no file is read or written here. What comes out differs from what went in only in the target
symbols and in the imports, helpers and marks that belong to them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import libcst as cst

from cppmega import fingerprint, marks, names
from cppmega.edits import function_text
from cppmega.errors import CppmegaError
from cppmega.page import Edit
from cppmega.source import Span, Text, decode, find, parse, shares_its_lines, span


@dataclass(frozen=True, slots=True)
class Step:
    """One edit of one page, in the order in which edits of a symbol compose."""

    page: str
    edit: Edit
    marked: bool


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The new bytes, and the fingerprint of each target after all edits."""

    data: bytes
    after: dict[str, str]


def rewrite(data: bytes, path: str, steps: Sequence[Step]) -> Rewritten:
    """Apply the steps to a file.

    Raises:
        CppmegaError: an edit does not fit, does nothing, renames its target, leaves a name
            undefined, or reaches beyond its target.
    """
    text = decode(data, path)
    by_symbol: dict[str, list[Step]] = {}
    for step in steps:
        by_symbol.setdefault(step.edit.symbol, []).append(step)
    tree = parse(text, path)
    done, after, inserted = text, {}, _Inserted(tree, text, path)
    for symbol, group in _bottom_up(by_symbol, tree, text, path):
        now = text if done is text else decode(done.encode("".join(done.lines), path), path)
        where = locate(parse(now, path), now, f"{path}:{symbol}")
        lines, after[symbol] = _edit_slice("".join(now.lines[where.start : where.end]), group, path)
        blocks = inserted.in_front_of(group, where)
        done = _splice(now, where, lines, blocks)
    done = _splice_imports(done, inserted.imports(steps), path)
    result = done.encode("".join(done.lines), path)
    _check(text, decode(result, path), path, list(by_symbol), inserted)
    return Rewritten(result, after)


def locate(tree: ast.Module, text: Text, target: str) -> Span:
    """The lines of the one definition that a target names.

    Raises:
        CppmegaError: `target-absent`, `target-ambiguous`, `target-shares-its-lines`.
    """
    found = find(tree, target.partition(":")[2])
    if len(found) != 1:
        raise CppmegaError(
            "target-ambiguous" if found else "target-absent",
            f"{target} is defined {len(found)} times.",
            "An edit must change exactly one definition.",
            "run `cppmega status` and see what the file holds",
        )
    where = span(tree, text, found[0])
    if shares_its_lines(text, found[0], where):
        raise CppmegaError(
            "target-shares-its-lines",
            f"{target} shares a line with other code.",
            "Cutting it out by lines would take that code with it.",
            "give the definition lines of its own",
        )
    return where


def _bottom_up(
    by_symbol: dict[str, list[Step]], tree: ast.Module, text: Text, path: str
) -> list[tuple[str, list[Step]]]:
    """Last definition first, so that earlier line numbers stay right.

    Where one target lies inside another (a class and its method, ordered by `after`) the pages'
    own order holds; every round locates its symbol anew.
    """
    groups = list(by_symbol.items())
    if any(a != b and b.startswith(a + ".") for a in by_symbol for b in by_symbol):
        return groups
    starts = {symbol: locate(tree, text, f"{path}:{symbol}").start for symbol, _ in groups}
    return sorted(groups, key=lambda item: -starts[item[0]])


def _edit_slice(source: str, group: Sequence[Step], path: str) -> tuple[str, str]:
    """The lines of a definition -> its new lines and their fingerprint."""
    module, node = fingerprint.parse_definition(source, f"{path}:{group[0].edit.symbol}")
    for step in group:
        node = _edited(step, node)
    for step in group:
        if step.marked:
            node = marks.with_mark(node, step.page, step.edit)
    new = _render(module, node, wrapped=source.startswith((" ", "\t")))
    after = fingerprint.of_node(node)
    for step in group:
        if after in step.edit.pins.values():
            raise _bad_edit(step, "gives a text that it would edit again")
    return new, after


def _render(module: cst.Module, node: cst.CSTNode, wrapped: bool) -> str:
    if not wrapped:
        return module.with_changes(body=[node]).code
    holder = module.body[0]
    assert isinstance(holder, cst.If)
    block = holder.body.with_changes(body=[node])
    code = module.with_changes(body=[holder.with_changes(body=block)]).code
    return code[code.index(module.default_newline) + len(module.default_newline) :]


def _edited(step: Step, node: cst.CSTNode) -> cst.CSTNode:
    before = fingerprint.of_node(node)
    try:
        new = step.edit.edit(node)
    except CppmegaError as error:
        raise CppmegaError(
            error.name, f"{step.page}: {error.what}", error.why, error.next
        ) from None
    if type(new) is not type(node) or new.name.value != node.name.value:  # type: ignore[attr-defined]
        raise _bad_edit(step, "gives back something else than its target")
    if fingerprint.of_node(new) == before:
        raise _bad_edit(step, "changes nothing")
    return new


def _bad_edit(step: Step, what: str) -> CppmegaError:
    return CppmegaError(
        "bad-edit",
        f"The edit of {step.edit.target} in page {step.page} {what}.",
        "A patch that is not what it says must not be applied.",
        f"correct the page; `cppmega diff {step.page}` shows the result",
    )


class _Inserted:
    """What belongs to the targets but stands outside them."""

    def __init__(self, tree: ast.Module, text: Text, path: str) -> None:
        self.text, self.path = text, path
        self.defined = names.top_level(tree)
        self.has_torch = "torch" in self.defined
        self.present = {
            ast.dump(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
        }
        self.helpers: dict[str, str] = {}
        self.import_lines: list[str] = []

    def imports(self, steps: Iterable[Step]) -> list[str]:
        for step in steps:
            for line in step.edit.imports:
                new = ast.dump(ast.parse(line).body[0]) not in self.present
                if new and line not in self.import_lines:
                    self.import_lines.append(line)
        return self.import_lines

    def in_front_of(self, group: Sequence[Step], where: Span) -> list[str]:
        """Helper definitions to write before the top-level statement that holds the target."""
        blocks: list[str] = []
        wanted: list[tuple[str, str]] = []
        if any(step.marked for step in group):
            wanted.append((marks.FUNCTION, marks.helper(self.has_torch)))
        for step in group:
            wanted += [(helper.__name__, function_text(helper)) for helper in step.edit.helpers]
        for name, block in wanted:
            if self.helpers.get(name) == block:
                continue
            if name in self.defined or name in self.helpers:
                raise CppmegaError(
                    "helper-name-taken",
                    f"{self.path} already defines {name}.",
                    "The patch would silently replace upstream's definition.",
                    "rename the helper in the page",
                )
            self.helpers[name] = block
            blocks.append(block)
        return blocks


def _splice(text: Text, where: Span, new: str, blocks: Sequence[str]) -> Text:
    front = "".join(block.rstrip("\n") + "\n\n\n" for block in blocks)
    front = front.replace("\n", text.newline)
    body = (
        "".join(text.lines[: where.top])
        + front
        + "".join(text.lines[where.top : where.start])
        + new
        + "".join(text.lines[where.end :])
    )
    return decode(text.encode(body, "the result"), "the result")


def _splice_imports(text: Text, lines: Sequence[str], path: str) -> Text:
    if not lines:
        return text
    tree = parse(text, path)
    at = 0
    for statement in tree.body:
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement, ast.Import | ast.ImportFrom) or (docstring and at == 0):
            at = statement.end_lineno or 0
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            break
    block = "".join(line + text.newline for line in lines)
    body = "".join(text.lines[:at]) + block + "".join(text.lines[at:])
    return decode(text.encode(body, path), path)


def _check(old: Text, new: Text, path: str, symbols: Sequence[str], extra: _Inserted) -> None:
    """Only the targets and what belongs to them changed, and every name is defined."""
    new_tree = parse(new, path)
    left, right = _rest(old, path, symbols), _rest(new, path, symbols)
    for block in [*extra.helpers.values()]:
        right = _without(right, (block.rstrip("\n") + "\n\n\n").replace("\n", new.newline))
    for line in extra.import_lines:
        right = _without(right, line + new.newline)
    if left != right:
        raise CppmegaError(
            "edit-reaches-beyond-its-target",
            f"Outside of {', '.join(symbols)} the text of {path} would change.",
            "Only what a page declares may differ from upstream.",
            "report this: an edit cannot normally do it",
        )
    keep = set(symbols) | set(extra.helpers)
    undefined = names.undefined(new_tree, keep, path)
    if undefined - names.undefined(parse(old, path), set(symbols), path):
        raise CppmegaError(
            "undefined-name",
            f"The patched {path} uses undefined names: {', '.join(sorted(undefined))}.",
            "It would raise a NameError in the middle of training.",
            "declare the import or the helper in the page",
        )


def _rest(text: Text, path: str, symbols: Sequence[str]) -> str:
    tree = parse(text, path)
    lines = list(text.lines)
    for symbol in symbols:
        where = locate(tree, text, f"{path}:{symbol}")
        for at in range(where.start, where.end):
            lines[at] = ""
    return "".join(lines)


def _without(body: str, block: str) -> str:
    head, found, tail = body.partition(block)
    return head + tail if found else body
