"""The fingerprint of a symbol: what its code says, whatever its comments and blank lines.

SHA-256 over the libcst text without docstrings, comments, blank lines and trailing white space,
at indentation zero. libcst gives the same text on every Python; `ast.dump` does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import libcst as cst
from libcst._nodes.internal import CodegenState

from cppmega.errors import CppmegaError

LENGTH = 16
"""Hex digits kept: 64 bits, far beyond an accident."""

_NOT_CODE = (cst.TrailingWhitespace, cst.EmptyLine)


class _BareState(CodegenState):
    """Writes code and leaves out everything that is not code, in one pass over the nodes.

    The same text as from a transformer that drops those nodes, in a quarter of its time.
    """

    def __init__(self) -> None:
        super().__init__("    ", "\n")
        self._starts: list[int] = []
        self._docstrings: dict[int, bool] = {}
        """Identity of a docstring's statement -> whether it is all that its block holds."""

    def increase_indent(self, value: str) -> None:
        self.indent_tokens.append(self.default_indent)

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
            del self.tokens[self._starts.pop() :]
            if type(node) is cst.TrailingWhitespace:
                self.tokens.append("\n")
        elif id(node) in self._docstrings:
            del self.tokens[self._starts.pop() :]
            if self._docstrings.pop(id(node)):
                self.add_indent_tokens()
                self.tokens.append("pass\n")


def is_docstring(statement: cst.CSTNode) -> bool:
    """Whether a statement is a string standing alone; an f-string is code."""
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


@lru_cache(maxsize=512)
def parse_definition(source: str, name: str = "the target") -> tuple[cst.Module, cst.CSTNode]:
    """The lines of one definition, at any indentation, to (module around it, its node).

    The lines stay as they are: they are wrapped in an `if` rather than dedented, because dedenting
    would change the strings that span lines. Nodes never change, so the answers are kept.
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


def forget() -> None:
    """Drop the kept nodes, one of which somebody has changed."""
    parse_definition.cache_clear()
    bare.cache_clear()


def _only(statements: Sequence[cst.CSTNode]) -> cst.CSTNode:
    if len(statements) != 1:
        raise CppmegaError(
            "unparsed-definition",
            f"Where one definition was expected stand {len(statements)} statements.",
            "A text that cannot be cut out cannot be compared with what a patch knows.",
            "report it with the file, or take the page out with `cppmega revert NAME`",
        )
    return statements[0]


@lru_cache(maxsize=512)
def bare(node: cst.CSTNode) -> str:
    """The text of a definition that the fingerprint is taken of."""
    state = _BareState()
    node._codegen(state)
    return "".join(state.tokens).strip() + "\n"


def of_text(text: str) -> str:
    """Hash of a bare text."""
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


@lru_cache(maxsize=512)
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
