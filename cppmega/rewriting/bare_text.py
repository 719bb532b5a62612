"""The bare text of a definition, cut out of its lines instead of printed from libcst's tree.

It is the text that `codegen.bare` prints, without that tree. Layouts in which the two could differ
(tabs, blocks that are not indented by four spaces, strings inside f-strings) are left to libcst.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from cppmega.rewriting.code_text import LITERAL, may_hold_literals
from cppmega.rewriting.source import Definition, blocks

_TOKEN = re.compile(rf"{LITERAL.pattern}|[()\[\]{{}}]|\\\n|\n", re.DOTALL)
_UNUSUAL = re.compile(r"[\t\f\r\v]")
_STEP = 4
"""Indentation of a block of the bare text, in spaces."""

_Docstrings = dict[int, tuple[int, bool]]
"""First row of a docstring -> its last row, and whether its block holds nothing else."""


class _UnusualError(Exception):
    """The layout is one that is left to libcst."""


@dataclass(slots=True)
class _Rows:
    """Facts about the lines of a definition, found from its tokens, by row."""

    comments: dict[int, int] = field(default_factory=dict)
    """Column at which a comment begins."""
    in_string: set[int] = field(default_factory=set)
    """Rows whose end lies inside a string."""
    joined: set[int] = field(default_factory=set)
    """Rows that a backslash joins to the next one."""
    in_brackets: set[int] = field(default_factory=set)
    """Rows that begin inside brackets."""


def bare_text(source: str, definition: Definition, first: int) -> str | None:
    """Return a definition without docstrings, comments and blank lines, indented by four spaces.

    Args:
        source: the lines of the definition, decorators included.
        definition: its syntax tree, as parsed from the file.
        first: 0-based line of the file with which the source begins.

    Returns:
        None if the layout is one of those that are left to libcst.
    """
    if _UNUSUAL.search(source):
        return None
    lines = source.split("\n")
    try:
        return _assembled(lines, _rows(source), _docstrings(lines, definition, first + 1))
    except _UnusualError:
        return None


def _rows(source: str) -> _Rows:
    found = _Rows()
    row = depth = start = 0
    for match in _TOKEN.finditer(source):
        token = match[0]
        head = token[0]
        if head == "\n":
            row, start = row + 1, match.end()
            if depth:
                found.in_brackets.add(row)
        elif head in "([{":
            depth += 1
        elif head in ")]}":
            depth -= 1
        elif head == "#":
            found.comments[row] = match.start() - start
        elif head == "\\":
            found.joined.add(row)
            row, start = row + 1, match.end()
        else:
            before = source[max(match.start() - 2, 0) : match.start()]
            formatted = not {*before}.isdisjoint("fFtT")
            several = "\n" in token
            if formatted and (may_hold_literals(token, before) or (several and "{" in token)):
                raise _UnusualError
            if several:
                ended = row + token.count("\n")
                found.in_string.update(range(row, ended))
                row, start = ended, match.start() + token.rfind("\n") + 1
    return found


def _docstrings(lines: Sequence[str], definition: Definition, first: int) -> _Docstrings:
    """Find the docstrings that have their lines to themselves, as libcst counts them."""
    found: _Docstrings = {}
    pending: list[ast.AST] = [definition]
    while pending:
        node = pending.pop()
        pending += blocks(node)
        statement = node.body[0] if isinstance(node, Definition) else None
        if not (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str | bytes)
        ):
            continue
        top, end = statement.lineno - first, (statement.end_lineno or statement.lineno) - first
        if lines[top][: statement.col_offset].strip():
            continue  # `def f(): "..."` has no block, so the string is code
        rest = lines[end].encode()[statement.end_col_offset or 0 :].strip()
        if rest and not rest.startswith(b"#"):
            raise _UnusualError
        found[top] = end, len(node.body) == 1  # type: ignore[attr-defined]
    return found


def _assembled(lines: Sequence[str], rows: _Rows, docstrings: _Docstrings) -> str:
    margin = block = _indentation(lines[0])
    left = " " * margin
    kept: list[str] = []
    row = -1
    while row + 1 < len(lines):
        row += 1
        line = lines[row][: rows.comments.get(row)]
        begins = row - 1 not in rows.in_string and row - 1 not in rows.joined
        if row not in rows.in_string and row not in rows.joined:
            line = line.rstrip(" ")
        if not begins:
            if row - 1 in rows.joined and not line:
                raise _UnusualError
            kept.append(line)
        elif not line:
            continue
        elif row in rows.in_brackets:
            # libcst attributes an indentation smaller than the block's to the line itself.
            kept.append(line[margin:] if line.startswith(" " * block) else line)
        else:
            before, block = block, _indentation(line)
            if not line.startswith(left) or block % _STEP != margin % _STEP:
                raise _UnusualError
            if block > before + _STEP:
                raise _UnusualError
            if row in docstrings:
                row, alone = docstrings[row]
                line = " " * block + "pass" if alone else ""
            if line:
                kept.append(line[margin:])
    return "\n".join(kept).strip() + "\n"


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
