"""The fingerprint of a symbol: what its code says, whatever its comments and blank lines.

SHA-256 over the libcst text without docstrings, comments, blank lines and trailing white space,
at indentation zero. libcst gives the same text on every Python; `ast.dump` does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import cast

import libcst as cst

from cppmega.errors import CppmegaError

LENGTH = 16
"""Hex digits kept: 64 bits, far beyond an accident."""


class _Bare(cst.CSTTransformer):
    """Drop everything that is not code."""

    def leave_TrailingWhitespace(  # noqa: N802
        self, original_node: cst.TrailingWhitespace, updated_node: cst.TrailingWhitespace
    ) -> cst.TrailingWhitespace:
        return cst.TrailingWhitespace(newline=cst.Newline())

    def leave_EmptyLine(  # noqa: N802
        self, original_node: cst.EmptyLine, updated_node: cst.EmptyLine
    ) -> cst.RemovalSentinel:
        return cst.RemoveFromParent()

    def leave_IndentedBlock(  # noqa: N802
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        return updated_node.with_changes(indent=None)

    def leave_FunctionDef(  # noqa: N802
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        return updated_node.with_changes(body=without_docstring(updated_node.body))

    def leave_ClassDef(  # noqa: N802
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        return updated_node.with_changes(body=without_docstring(updated_node.body))


def is_docstring(statement: cst.CSTNode) -> bool:
    """Whether a statement is a string standing alone."""
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and len(statement.body) == 1
        and isinstance(statement.body[0], cst.Expr)
        and isinstance(statement.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )


def without_docstring(body: cst.BaseSuite) -> cst.BaseSuite:
    """The body without its docstring; a body that is only a docstring becomes `pass`."""
    statements: Sequence[cst.CSTNode] = body.body
    if not isinstance(body, cst.IndentedBlock) or not statements or not is_docstring(statements[0]):
        return body
    rest = list(statements[1:]) or [cst.SimpleStatementLine([cst.Pass()])]
    return body.with_changes(body=rest)


def parse_definition(source: str, name: str = "the target") -> tuple[cst.Module, cst.CSTNode]:
    """The lines of one definition, at any indentation, to (module around it, its node).

    The lines stay as they are: they are wrapped in an `if` rather than dedented, because dedenting
    would change the strings that span lines.
    """
    indent = source[: len(source) - len(source.lstrip(" \t"))]
    config = cst.PartialParserConfig(default_indent="    ")
    try:
        if not indent:
            module = cst.parse_module(source, config)
            return module, _only(module.body)
        newline = "\r\n" if "\r\n" in source else "\r" if "\n" not in source else "\n"
        module = cst.parse_module(f"if 1:{newline}{source}", config)
        return module, _only(cast(cst.If, module.body[0]).body.body)
    except cst.ParserSyntaxError as error:
        raise CppmegaError(
            "unparsed-definition",
            f"libcst cannot parse {name}: {error.message}.",
            "A text that cannot be parsed cannot be compared with what a patch knows.",
            "report it with the file, or take the page out with `cppmega revert NAME`",
        ) from None


def _only(statements: Sequence[cst.CSTNode]) -> cst.CSTNode:
    if len(statements) != 1:
        raise AssertionError(f"expected one definition, found {len(statements)} statements")
    return statements[0]


def bare(node: cst.CSTNode) -> str:
    """The text of a definition that the fingerprint is taken of."""
    stripped = cast(cst.BaseCompoundStatement, node.visit(_Bare()))
    return cst.Module([stripped], default_newline="\n", default_indent="    ").code.strip() + "\n"


def of_text(text: str) -> str:
    """Hash of a bare text."""
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def of_node(node: cst.CSTNode) -> str:
    """Fingerprint of a definition given as a libcst node."""
    return of_text(bare(node))


def of_source(source: str, name: str = "the target") -> str:
    """Fingerprint of a definition given as its lines."""
    return of_node(parse_definition(source, name)[1])


def of_class(node: cst.CSTNode, methods: Sequence[str]) -> str:
    """What a class swap depends on: the bases, `__init__` and the methods it overrides."""
    if not isinstance(node, cst.ClassDef):
        raise CppmegaError(
            "not-a-class",
            "A class swap names a target that is not a class.",
            "There would be nothing to subclass.",
            "use kind `function-swap` for functions and `method-wrap` for methods",
        )
    code = cst.Module([]).code_for_node
    parts = [
        code(argument.with_changes(comma=cst.MaybeSentinel.DEFAULT))
        for argument in (*node.bases, *node.keywords)
    ]
    for name in ("__init__", *methods):
        found = [
            s for s in node.body.body if isinstance(s, cst.FunctionDef) and s.name.value == name
        ]
        parts.append("".join(bare(function) for function in found) or f"no {name}\n")
    return of_text("\n".join(parts))
