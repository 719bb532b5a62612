"""The fingerprint of a symbol: a hash of its code that ignores comments and blank lines.

SHA-256 over the text without docstrings, comments, blank lines and trailing white space, with
blocks indented by four spaces. Unlike that of `ast.dump`, it is the same on all versions of Python.
"""

from __future__ import annotations

import hashlib
import io
import re
import tokenize
from collections.abc import Sequence
from typing import cast

import libcst as cst

from cppmega.errors import CppmegaError
from cppmega.rewriting.codegen import text

LENGTH = 16
"""Hex digits kept: 64 bits, enough to rule out accidental collisions."""

_INDENT = "    "
_PLAIN_STRING = re.compile(r"[rRbBuU]*[\"']")
_LAYOUT = {"NL", "ENDMARKER"}
_OPENING = {"FSTRING_START", "TSTRING_START"}
_CLOSING = {"FSTRING_END", "TSTRING_END"}

_Line = tuple[int, list[tokenize.TokenInfo]]
"""The number of blocks around a logical line, and its tokens without comments and line ends."""


def parse_definition(source: str, name: str = "the target") -> tuple[cst.Module, cst.CSTNode]:
    """Parse the lines of one symbol, at any indentation, into (enclosing module, node).

    The node of a statement is a module that holds only this statement.

    Indented lines are wrapped in an `if` rather than dedented, because dedenting would change
    strings that span lines.
    """
    indent = source[: len(source) - len(source.lstrip(" \t"))]
    config = cst.PartialParserConfig(default_indent=_INDENT)
    try:
        if not indent:
            module = cst.parse_module(source, config)
            return module, _node(module, module.body)
        newline = "\r\n" if "\r\n" in source else "\r" if "\n" not in source else "\n"
        module = cst.parse_module(f"if 1:{newline}{source}", config)
        return module, _node(module, cast(cst.If, module.body[0]).body.body)
    except cst.ParserSyntaxError as error:
        raise CppmegaError(
            "unparsed-definition",
            f"libcst cannot parse {name}: {error.message}.",
            "Without parsing it, it cannot be compared with the texts that a patch knows.",
            "report it with the file, or revert the page with `cppmega revert NAME`",
        ) from None


def _node(module: cst.Module, body: Sequence[cst.CSTNode]) -> cst.CSTNode:
    if isinstance(body[0], cst.FunctionDef | cst.ClassDef):
        return body[0]
    return module.with_changes(body=body, header=(), footer=())


def bare(source: str) -> str:
    """Return the lines of a definition without what is not code, indented by four spaces."""
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    rows = source.split("\n")
    lines, comments, in_string = _logical_lines(source)
    kept: list[str] = []
    for at, (depth, tokens) in enumerate(lines):
        margin = _INDENT * (depth - lines[0][0])
        if _is_docstring(lines, at):
            if at + 1 == len(lines) or lines[at + 1][0] < depth:
                kept.append(f"{margin}pass")
            continue
        first, last = tokens[0].start[0] - 1, tokens[-1].end[0] - 1
        block = rows[first][: tokens[0].start[1]]
        verbatim = False
        for row in range(first, last + 1):
            line = rows[row][: comments.get(row)]
            joined = row not in comments and line.endswith("\\")
            line = line if row in in_string else line.rstrip()
            if not verbatim and line.startswith(block):
                line = margin + line[len(block) :]
            if verbatim or line:
                kept.append(line)
            verbatim = joined or row in in_string
    return "\n".join(kept).strip() + "\n"


def _logical_lines(source: str) -> tuple[list[_Line], dict[int, int], set[int]]:
    """The logical lines; the column of a comment by its row; rows whose end is in a string."""
    lines: list[_Line] = []
    comments: dict[int, int] = {}
    in_string: set[int] = set()
    tokens: list[tokenize.TokenInfo] = []
    opened: list[int] = []
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind, row = tokenize.tok_name[token.type], token.start[0] - 1
        if kind == "COMMENT" and not opened:
            comments[row] = token.start[1]
        elif kind in ("INDENT", "DEDENT"):
            depth += 1 if kind == "INDENT" else -1
        elif kind == "NEWLINE":
            lines.append((depth, tokens))
            tokens = []
        elif kind not in _LAYOUT:
            tokens.append(token)
        if kind in _OPENING:
            opened.append(row)
        elif kind in _CLOSING or kind == "STRING":
            in_string.update(range(opened.pop() if kind in _CLOSING else row, token.end[0] - 1))
    return lines, comments, in_string


def _is_docstring(lines: Sequence[_Line], at: int) -> bool:
    """Whether a logical line is the first of a function or a class, and only a string."""
    if not at or lines[at][0] <= lines[at - 1][0]:
        return False
    head = [token.string for token in lines[at - 1][1][:2]]
    own = [token.string for token in lines[at][1] if token.string not in "()"]
    defines = head[0] in ("def", "class") or head == ["async", "def"]
    return defines and bool(own) and all(map(_PLAIN_STRING.match, own))


def of_text(bare_text: str) -> str:
    """Hash of a bare text."""
    return hashlib.sha256(bare_text.encode()).hexdigest()[:LENGTH]


def of_source(source: str) -> str:
    """Fingerprint of a definition given as its lines."""
    return of_text(bare(source))


def of_class(node: cst.CSTNode, methods: Sequence[str]) -> str:
    """Fingerprint of what a class swap depends on: bases, `__init__`, overridden methods."""
    if not isinstance(node, cst.ClassDef):
        raise CppmegaError(
            "not-a-class",
            "A class swap names a target that is not a class.",
            "There would be nothing to subclass.",
            "use kind `function-swap` for functions and `method-wrap` for methods",
        )
    parts = [
        text(argument.with_changes(comma=cst.MaybeSentinel.DEFAULT))
        for argument in (*node.bases, *node.keywords)
    ]
    for name in ("__init__", *methods):
        found = [
            s for s in node.body.body if isinstance(s, cst.FunctionDef) and s.name.value == name
        ]
        parts.append("".join(bare(text(function)) for function in found) or f"no {name}\n")
    return of_text("\n".join(parts))
