"""Definitions without the statements that no edit inspects.

libcst creates an object for every token and blank, and most of the time of an apply is spent on
statements that do not change. A pattern edit cannot match a statement that lacks one of the
pattern's names: such statements are cut out of the text before it is parsed, with a name in their
place, and put back, byte for byte, into the text that the edits produce.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cppmega.page import Edit
from cppmega.rewriting.repeatable import is_repeatable, patterns_of
from cppmega.rewriting.source import Definition, Span, Text, first_line, plain

_PLACE = "_cppmega_lines_{}"
_FOUND = re.compile(r"(?:(?<=[\r\n])|\A)[ \t]*_cppmega_lines_(\d+)[ \t]*(?:\r\n|\r|\n|\Z)")
"""A line of its own; `^` would not match after a line end of "\\r" alone."""
_WORD = re.compile(r"\w+")
_FEWEST = 8
"""Minimum number of lines for which a cut is worthwhile."""

Names = frozenset[str]


@dataclass(frozen=True, slots=True)
class Abridged:
    """A text and what was cut out of it."""

    text: str
    cuts: tuple[str, ...] = ()

    def restored(self, text: str) -> str:
        """Put the cuts back into an edited text; those that an edit removed stay out."""
        return _FOUND.sub(lambda found: self.cuts[int(found[1])], text) if self.cuts else text


def names_of(pattern: str) -> list[Names]:
    """The names in each statement of a pattern; a place that matches it contains all of them."""
    try:
        tree = ast.parse(f"{pattern} pass" if pattern.endswith(":") else pattern)
    except SyntaxError:
        return [frozenset()]  # without a name to look for, every statement is kept
    if not pattern.isascii():  # Python normalizes names: the text may spell them differently
        return [frozenset()]
    return [frozenset(_names(statement)) for statement in tree.body]


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant):
            for _, value in ast.iter_fields(node):
                for text in value if isinstance(value, list) else [value]:
                    if isinstance(text, str):
                        yield from _WORD.findall(text)


def abridge(
    text: Text, definition: Definition, where: Span, symbol: str, edits: Sequence[Edit]
) -> Abridged:
    """Cut out of a definition the statements that no edit inspects.

    Args:
        text: the text of the file.
        definition: the definition, as parsed from the text.
        where: the lines of the definition.
        symbol: its name, with which the name of each edit's target begins.
        edits: the edits of it. If one of them does not work by patterns, nothing is cut out.
    """
    body, lines = definition.body, text.lines
    whole = "".join(lines[where.start : where.end])
    if _PLACE.format("") in whole or not all(is_repeatable(edit.edit) for edit in edits):
        return Abridged(whole)
    sought = [names for edit in edits for names in _sought_by(edit, symbol)]
    kept: list[str] = []
    cuts: list[str] = []
    at = where.start
    for first, last in _runs(text, body, sought):
        begin, stop = body[first - 1].end_lineno or 0, body[last].end_lineno or 0
        if stop - begin < _FEWEST:
            continue
        margin = lines[body[first].lineno - 1][: body[first].col_offset]
        ending = lines[stop - 1][len(lines[stop - 1].rstrip("\r\n")) :]
        kept += [*lines[at:begin], f"{margin}{_PLACE.format(len(cuts))}{ending}"]
        cuts.append("".join(lines[begin:stop]))
        at = stop
    return Abridged("".join([*kept, *lines[at : where.end]]), tuple(cuts))


def _sought_by(edit: Edit, symbol: str) -> Iterator[Names]:
    """Names of the definition that an edit changes or marks, and those in its patterns."""
    for dotted in (edit.symbol[len(symbol) + 1 :], "__init__" if edit.mark is None else edit.mark):
        if dotted:
            yield frozenset([plain(dotted.partition(".")[0])])
    for pattern in patterns_of(edit.edit):
        yield from names_of(pattern)


def _runs(
    text: Text, body: Sequence[ast.stmt], sought: Sequence[Names]
) -> Iterator[tuple[int, int]]:
    """First and last of consecutive statements that can be cut out, except the very first one."""
    begin = None
    for at in range(1, len(body) + 1):
        if at < len(body) and _is_removable(text, body[at - 1], body[at], sought):
            begin = at if begin is None else begin
        elif begin is not None:
            if at == len(body) or _on_lines_of_its_own(text, body[at - 1], body[at]):
                yield begin, at - 1
            begin = None


def _is_removable(
    text: Text, before: ast.stmt, statement: ast.stmt, sought: Sequence[Names]
) -> bool:
    if not _on_lines_of_its_own(text, before, statement):
        return False
    own = "".join(text.lines[(before.end_lineno or 0) : statement.end_lineno])
    words = set(_WORD.findall(own))
    return not any(names <= words for names in sought)


def _on_lines_of_its_own(text: Text, before: ast.stmt, statement: ast.stmt) -> bool:
    first = first_line(statement, text)
    head = text.lines[first - 1]
    return first > (before.end_lineno or 0) and not head[: len(head) - len(head.lstrip())].strip()
