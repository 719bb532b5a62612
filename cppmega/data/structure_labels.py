"""Structure ids of the tokens of a document, from the syntax tree of its text.

`structure` defines what they mean. The grammars are separate packages, which the extra `data`
installs.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from cppmega.data.structure import LEVELS, MOST_ERRORS, NODE_TYPES, Kind, Language
from cppmega.errors import CppmegaError

if TYPE_CHECKING:
    import numpy as np
    import tree_sitter

_ERROR = 0xFFFF
"""Id that tree-sitter gives to every ERROR node."""
_BLANK = b" \t\n\r\v\f"


def grammars() -> dict[str, str]:
    """Check that all grammars can be used.

    Returns:
        Package -> version, of tree-sitter and of every grammar: they decide the ids, too.

    Raises:
        CppmegaError: `package-missing`, `grammar-differs`.
    """
    for language in NODE_TYPES:
        _kinds(language)
    packages = ("tree-sitter", *(f"tree-sitter-{language}" for language in NODE_TYPES))
    return {package: metadata.version(package) for package in packages}


def of_bytes(text: bytes, language: Language | None) -> tuple[np.ndarray[Any, Any], bool]:
    """The structure code of every byte of a document.

    Args:
        text: the document, UTF-8; bytes that are not become ERROR nodes.
        language: of the document; None: there is no grammar for it.

    Returns:
        Codes `kind * LEVELS + depth`, uint8, one per byte; and whether the text was parsed as that
        language. If not, all codes are 0.
    """
    import numpy as np

    nothing = np.zeros(len(text), np.uint8)
    if language is None:
        return nothing, False
    places, codes, errors = _walk(_parser(language).parse(text).root_node, _kinds(language))
    if errors > MOST_ERRORS * len(text):
        return nothing, False
    # The code at a byte is that of the last change at or before it.
    lengths = np.array([*places[1:], len(text)], np.int64) - np.array(places, np.int64)
    return np.repeat(np.array(codes, np.uint8), lengths), True


def of_tokens(
    text: bytes,
    of_each_byte: np.ndarray[Any, Any],
    begins: np.ndarray[Any, Any],
    ends: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any]:
    """The structure code of every token: that of its first non-blank byte.

    Args:
        text: the document.
        of_each_byte: uint8, by `of_bytes`.
        begins: first byte of each token in the text, int64 [tokens].
        ends: the byte after its last, int64 [tokens]; a token may be empty.

    Returns:
        uint8 [tokens].
    """
    import numpy as np

    size = len(text)
    blank = np.isin(np.frombuffer(text, np.uint8), np.frombuffer(_BLANK, np.uint8))
    solid = np.where(blank, size, np.arange(size))
    following = np.append(np.minimum.accumulate(solid[::-1])[::-1], size)
    first = following[begins]
    places = np.where(first < ends, first, begins)
    codes: np.ndarray[Any, Any] = np.append(of_each_byte, np.uint8(0))[places]
    return codes


def _walk(root: tree_sitter.Node, kinds: list[int]) -> tuple[list[int], list[int], int]:
    """Walk the named nodes in the order of the text.

    Returns:
        Bytes at which the code changes, the code from there on, and bytes in ERROR nodes.
    """
    places, codes, errors = [0], [0], 0
    # What is still to be visited, the next last: a node with the kind and depth around it, or the
    # place where one ends with the code around it.
    waiting: list[tuple[tree_sitter.Node | int, int, int]] = [(root, 0, -1)]
    while waiting:
        node, kind, depth = waiting.pop()
        if isinstance(node, int):
            places.append(node)
            codes.append(_code(kind, depth))
            continue
        own, end = node.kind_id, node.end_byte
        places.append(node.start_byte)
        waiting.append((end, kind, depth))
        if own == _ERROR:
            codes.append(0)
            errors += end - node.start_byte
            continue
        kind, depth = kinds[own] or kind, depth + 1
        codes.append(_code(kind, depth))
        waiting += [(child, kind, depth) for child in reversed(node.named_children)]
    return places, codes, errors


def _code(kind: int, depth: int) -> int:
    """Both ids as one number; outside of the root, where only blanks are, it is 0."""
    return kind * LEVELS + min(max(depth, 0), LEVELS - 1)


@cache
def _parser(language: Language) -> tree_sitter.Parser:
    from tree_sitter import Parser

    return Parser(_grammar(language))


@cache
def _grammar(language: Language) -> tree_sitter.Language:
    try:
        from tree_sitter import Language as Grammar

        package: Any = importlib.import_module(f"tree_sitter_{language}")
    except ImportError as error:
        raise CppmegaError(
            "package-missing",
            f"The package {error.name} is missing.",
            "The structure of source code is read with the grammars of tree-sitter.",
            "pip install 'cppmega[data]', or prepare the data without --structure",
        ) from None
    return Grammar(package.language())


@cache
def _kinds(language: Language) -> list[int]:
    """The kind of every id that the grammar has for a node type; 0: that of the enclosing node.

    Raises:
        CppmegaError: `package-missing`, `grammar-differs`.
    """
    grammar = _grammar(language)
    kinds = [int(Kind.NONE)] * grammar.node_kind_count
    missing = dict(NODE_TYPES[language])
    for number in range(grammar.node_kind_count):
        name = grammar.node_kind_for_id(number)
        if name in NODE_TYPES[language] and grammar.node_kind_is_named(number):
            kinds[number] = NODE_TYPES[language][name]
            missing.pop(name, None)
    if missing:
        raise CppmegaError(
            "grammar-differs",
            f"The installed tree-sitter-{language} {metadata.version(f'tree-sitter-{language}')} "
            f"has no nodes of the types {', '.join(missing)}.",
            "Their text would silently get the kind of the construct around it.",
            "pip install 'cppmega[data]' installs the versions that the table was written for",
        )
    return kinds
