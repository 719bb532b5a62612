"""The text of libcst nodes: complete, and reduced to code.

Printing is slow. These states print the same text as libcst's own without recording positions.
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


class _Printer(CodegenState):
    """Prints all of a node."""

    def record_syntactic_position(
        self, node: cst.CSTNode, *, start_node: Any = None, end_node: Any = None
    ) -> Any:
        return _NO_POSITION


class _Bare(_Printer):
    """Prints a node with blocks indented by four spaces, and cuts out what is not code."""

    def __init__(self) -> None:
        super().__init__(INDENT, "\n")
        self._starts: list[int] = []
        """Where each of the nested nodes that are not code begins among the tokens."""
        self._docstrings: dict[int, bool] = {}
        """Identity of a docstring's statement -> whether its block holds nothing else."""

    def increase_indent(self, value: str) -> None:
        self.indent_tokens.append(INDENT)

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
        self.tokens[self._starts.pop() :] = instead


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


def text(node: cst.CSTNode, indent: str = INDENT, newline: str = "\n", margin: str = "") -> str:
    """Return the complete text of a node.

    Args:
        indent: the default indentation of its module.
        margin: the indentation of the node itself.
    """
    state = _Printer(indent, newline)
    if margin:
        state.indent_tokens.append(margin)
    node._codegen(state)
    return "".join(state.tokens)


@lru_cache(maxsize=512)
def bare(node: cst.CSTNode) -> str:
    """Return a definition without docstrings, comments and blank lines, indented by four spaces."""
    state = _Bare()
    node._codegen(state)
    return "".join(state.tokens).strip() + "\n"


def first_in(function: cst.FunctionDef, call: cst.BaseStatement) -> cst.FunctionDef:
    """The function with a statement before all others but its docstring."""
    if not isinstance(function.body, cst.IndentedBlock):
        inner = cst.SimpleStatementLine(list(cast(cst.SimpleStatementSuite, function.body).body))
        return function.with_changes(body=cst.IndentedBlock([call, inner]))
    body = list(function.body.body)
    at = 1 if body and is_docstring(body[0]) else 0
    return function.with_changes(
        body=function.body.with_changes(body=[*body[:at], call, *body[at:]])
    )
