"""The text of libcst nodes: complete, and reduced to code.

Printing is the slowest part of an apply. These states print the same text as libcst's own without
recording positions, and produce both texts in one pass where both are needed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, cast

import libcst as cst
from libcst._nodes.internal import CodegenState

INDENT = "    "
"""The indentation of the bare text, regardless of the file's."""

_NOT_CODE = (cst.TrailingWhitespace, cst.EmptyLine)
_NO_POSITION: AbstractContextManager[None] = nullcontext()


class _Margin(str):
    """The indentation of the definition itself, which its bare text does not have."""

    __slots__ = ()


class _Printer(CodegenState):
    """Prints all of a node."""

    def record_syntactic_position(
        self, node: cst.CSTNode, *, start_node: Any = None, end_node: Any = None
    ) -> Any:
        return _NO_POSITION


class _TwoTexts(_Printer):
    """Prints all of a node and records which of its tokens the bare text leaves out."""

    def __init__(self, indent: str, newline: str, margin: str = "") -> None:
        super().__init__(indent, newline)
        if margin:
            self.indent_tokens.append(_Margin(margin))
        self.margin = bool(margin)
        self.indented_as_bare = True
        self._starts: list[int] = []
        self._cuts: list[tuple[int, int, list[str]]] = []
        """First token, the one after the last, and their replacement in the bare text."""
        self._docstrings: dict[int, bool] = {}
        """Identity of a docstring's statement -> whether its block holds nothing else."""

    def increase_indent(self, value: str) -> None:
        self.indented_as_bare = self.indented_as_bare and value == INDENT
        self.indent_tokens.append(value)

    def before_codegen(self, node: cst.CSTNode) -> None:
        kind = type(node)
        if kind in _NOT_CODE or id(node) in self._docstrings:
            self._starts.append(len(self.tokens))
        elif kind is cst.FunctionDef or kind is cst.ClassDef:
            body = cast(cst.FunctionDef, node).body
            if isinstance(body, cst.IndentedBlock) and body.body and is_docstring(body.body[0]):
                self._docstrings[id(body.body[0])] = len(body.body) == 1

    def after_codegen(self, node: cst.CSTNode) -> None:
        if type(node) in _NOT_CODE:
            self._cut(["\n"] if type(node) is cst.TrailingWhitespace else [])
        elif id(node) in self._docstrings:
            alone = self._docstrings.pop(id(node))
            self._cut([*self.indent_tokens, "pass\n"] if alone else [])

    def _cut(self, instead: list[str]) -> None:
        start = self._starts.pop()
        if not self._starts:
            self._cuts.append((start, len(self.tokens), instead))

    def bare(self) -> str:
        """Return the text without docstrings, comments and blank lines, in its own indentation."""
        pieces: list[str] = []
        at = 0
        for start, stop, instead in self._cuts:
            pieces += self.tokens[at:start]
            pieces += instead
            at = stop
        pieces += self.tokens[at:]
        if self.margin:
            pieces = [piece for piece in pieces if type(piece) is not _Margin]
        return "".join(pieces).strip() + "\n"


def is_docstring(statement: cst.CSTNode) -> bool:
    """Whether a statement is a string by itself; an f-string is code."""
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and len(statement.body) == 1
        and isinstance(statement.body[0], cst.Expr)
        and _is_plain_string(statement.body[0].value)
    )


def _is_plain_string(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.ConcatenatedString):
        return _is_plain_string(node.left) and _is_plain_string(node.right)
    return isinstance(node, cst.SimpleString)


def text(node: cst.CSTNode, indent: str = INDENT, newline: str = "\n") -> str:
    """The complete text of a node."""
    state = _Printer(indent, newline)
    node._codegen(state)
    return "".join(state.tokens)


@lru_cache(maxsize=512)
def bare(node: cst.CSTNode) -> str:
    """Return a definition without docstrings, comments and blank lines, indented by four spaces."""
    state = _Evenly(INDENT, "\n")
    node._codegen(state)
    return state.bare()


class _Evenly(_TwoTexts):
    """Indents every block by four spaces."""

    def increase_indent(self, value: str) -> None:
        self.indent_tokens.append(INDENT)


def both(node: cst.CSTNode, indent: str, newline: str, margin: str) -> tuple[str, str]:
    """Return the complete text of a definition, and its bare text.

    Args:
        indent: the default indentation of its module.
        margin: the indentation of the definition itself.
    """
    state = _TwoTexts(indent, newline, margin)
    node._codegen(state)
    alike = state.indented_as_bare and newline == "\n"
    return "".join(state.tokens), state.bare() if alike else bare(node)
