"""The fingerprint of a symbol: a hash of its code that ignores comments and blank lines.

SHA-256 over the text without docstrings, comments, blank lines and trailing white space, at
indentation zero. Unlike that of `ast.dump`, it is the same on every version of Python.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import libcst as cst

from cppmega.errors import CppmegaError
from cppmega.rewriting.bare_text import bare_text
from cppmega.rewriting.codegen import bare, text
from cppmega.rewriting.source import Definition

LENGTH = 16
"""Hex digits kept: 64 bits, enough to rule out accidental collisions."""


@lru_cache(maxsize=512)
def parse_definition(source: str, name: str = "the target") -> tuple[cst.Module, cst.CSTNode]:
    """Parse the lines of one definition, at any indentation, into (enclosing module, node).

    Indented lines are wrapped in an `if` rather than dedented, because dedenting would change
    strings that span lines. Nodes are immutable by convention, so results are cached.
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
            "Without parsing it, it cannot be compared with the texts that a patch knows.",
            "report it with the file, or revert the page with `cppmega revert NAME`",
        ) from None


def forget() -> None:
    """Clear the caches, after one of the cached nodes was mutated."""
    parse_definition.cache_clear()
    bare.cache_clear()


def _only(statements: Sequence[cst.CSTNode]) -> cst.CSTNode:
    if len(statements) != 1:
        raise CppmegaError(
            "unparsed-definition",
            f"Expected one definition, but found {len(statements)} statements.",
            "Only a single definition can be compared with the texts that a patch knows.",
            "report it with the file, or revert the page with `cppmega revert NAME`",
        )
    return statements[0]


def of_text(bare_text: str) -> str:
    """Hash of a bare text."""
    return hashlib.sha256(bare_text.encode()).hexdigest()[:LENGTH]


@lru_cache(maxsize=512)
def of_node(node: cst.CSTNode) -> str:
    """Fingerprint of a definition given as a libcst node."""
    return of_text(bare(node))


def of_source(source: str, name: str = "the target") -> str:
    """Fingerprint of a definition given as its lines."""
    return of_node(parse_definition(source, name)[1])


def of_lines(source: str, definition: Definition, first: int, name: str = "the target") -> str:
    """Fingerprint of a definition given as its lines and its syntax tree.

    Args:
        first: 0-based line of the file with which the source begins.
    """
    found = bare_text(source, definition, first)
    return of_source(source, name) if found is None else of_text(found)


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
        parts.append("".join(bare(function) for function in found) or f"no {name}\n")
    return of_text("\n".join(parts))
