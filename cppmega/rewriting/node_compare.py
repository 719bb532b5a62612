"""Compare libcst nodes without printing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any, cast

import libcst as cst

from cppmega.rewriting.codegen import is_docstring


def same(one: Any, other: Any) -> bool:
    """Whether two nodes print the same text; fast if they share most of their parts."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, cst.CSTNode):
        for name in _names(type(one)):
            mine, theirs = getattr(one, name), getattr(other, name)
            if mine is not theirs and not same(mine, theirs):
                return False
        return True
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def differ(one: Any, other: Any) -> bool:
    """Whether two nodes are certainly different code, regardless of layout.

    Fast, but False proves nothing: different trees may print the same text.
    """
    if one is other:
        return False
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if not one or not other:
            return False  # an empty block prints as `pass`
        return len(one) != len(other) or any(map(differ, one, other))
    if not isinstance(one, cst.CSTNode | None) or not isinstance(other, cst.CSTNode | None):
        return isinstance(one, str) and isinstance(other, str) and one != other
    if type(one) is not type(other):
        return True
    if isinstance(one, cst.IndentedBlock) and isinstance(other, cst.IndentedBlock):
        return differ(_without_docstring(one), _without_docstring(other))
    return any(
        differ(getattr(one, name), getattr(other, name)) for name in parts(cast(Any, one).__class__)
    )


def _without_docstring(block: cst.IndentedBlock) -> Sequence[cst.BaseStatement]:
    return block.body[1:] if block.body and is_docstring(block.body[0]) else block.body


@cache
def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


_LAYOUT = (
    *("lpar", "rpar", "lbracket", "rbracket", "lbrace", "rbrace", "comma", "semicolon", "equal"),
    *("colon", "first_colon", "second_colon", "dot", "operator", "leading_lines", "header"),
    *("lines_after_decorators", "trailing_whitespace", "footer", "asynchronous"),
)


@cache
def parts(kind: Any) -> list[str]:
    """Fields of a node that may hold code, not only layout."""
    names = [field.name for field in fields(kind)]
    return [name for name in names if name not in _LAYOUT and not name.startswith("whitespace")]
