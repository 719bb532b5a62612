"""The text of libcst nodes, printed without recording positions, which takes half of the time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import libcst as cst
from libcst._nodes.internal import CodegenState

INDENT = "    "

_NO_POSITION: AbstractContextManager[None] = nullcontext()


class _Printer(CodegenState):
    """Prints all of a node."""

    def record_syntactic_position(
        self, node: cst.CSTNode, *, start_node: Any = None, end_node: Any = None
    ) -> Any:
        return _NO_POSITION


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
