"""Find the definitions of a tree that are most similar to one that is gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import SequenceMatcher

import msgspec

from cppmega.authoring import statements
from cppmega.errors import CppmegaError, closest
from cppmega.overlay.survey import Survey
from cppmega.rewriting.source import Definition, decode, definitions, parse, statement_symbols
from cppmega.tree.installed import Tree

_WORD = re.compile(r"[A-Za-z_]\w+")
_FILES = 6
"""Number of additional files to search; parsing all of them would take seconds."""
_RARE = 16
"""Number of long names of a definition by which the files that may contain it are found."""
_ALIKE = 0.7
"""Minimum likeness. Any two functions share about half of their words."""
_ALIKE_BY_NAME = 0.5
"""The same for a definition of the same file that has the same last name."""
_RENAMED = 0.85
"""Likeness with which a definition that OLD lacks is the one that is gone."""


class Match(msgspec.Struct, frozen=True):
    """A definition of the tree, and how much of the text it shares with the one that is gone."""

    target: str
    likeness: float


def is_new_name(target: str, match: Match, old: Survey) -> bool:
    """Whether a match is the definition that is gone, under another name.

    Args:
        old: the tree that has the target; it has no definition of the new name.
    """
    alike = match.likeness >= _RENAMED or _last_name(match.target) == _last_name(target)
    return alike and not old.exists(match.target)


def _last_name(target: str) -> tuple[str, str]:
    path, _, symbol = target.partition(":")
    return path, symbol.rpartition(".")[2]


def most_similar(tree: Tree, target: str, lines: Sequence[str], limit: int = 3) -> list[Match]:
    """Return the definitions that are most similar to given statements, best first.

    Text counts most. Among equally similar texts, the more similar name comes first.

    Args:
        target: where the statements were defined.
        lines: the statements.
        limit: the number of definitions to return.
    """
    path, _, symbol = target.partition(":")
    words = set(_WORD.findall("\n".join(lines)))
    is_class = any(line.startswith("class ") for line in lines[:4])
    scored: list[tuple[float, Match]] = []
    for file in _likely_files(tree, path, words):
        for name, node in _definitions(tree, file):
            if isinstance(node, ast.ClassDef) != is_class or (file == path and name == symbol):
                continue
            namesake = _last_name(f"{file}:{name}") == _last_name(target)
            enough = _ALIKE_BY_NAME if namesake else _ALIKE
            likeness = _likeness(lines, words, node, enough)
            if likeness >= enough:
                names = SequenceMatcher(None, symbol, name).ratio()
                match = Match(f"{file}:{name}", likeness)
                scored.append((likeness + names / 4, match))
    scored.sort(key=lambda item: (-item[0], item[1].target))
    return [match for _, match in scored[:limit]]


def similar_names(tree: Tree, target: str) -> list[str]:
    """Return targets with similar names, for a mistyped one."""
    path, _, symbol = target.partition(":")
    if tree.read(path) is None:
        files = tree.python_files
        same = [file for file in files if file.rpartition("/")[2] == path.rpartition("/")[2]]
        return [f"{file}:{symbol}" for file in same[:3] or closest(path, files, 3)]
    names = [name for name, _ in _definitions(tree, path)]
    with suppress(CppmegaError):
        names += sorted(statement_symbols(parse(decode(tree.read(path) or b"", path), path)))
    last = symbol.rpartition(".")[2]
    namesakes = [name for name in names if name.rpartition(".")[2] == last]
    return [f"{path}:{name}" for name in namesakes[:3] or closest(symbol, names, 3)]


def _likely_files(tree: Tree, path: str, words: set[str]) -> list[str]:
    rare = [word.encode() for word in sorted(words, key=lambda w: (-len(w), w))[:_RARE]]
    hits: list[tuple[int, str]] = []
    package = path.partition("/")[0] + "/"
    for file in tree.python_files:
        if file != path and file.startswith(package):
            data = tree.read(file) or b""
            hits.append((-sum(word in data for word in rare), file))
    hits.sort()
    enough = [file for count, file in hits[:_FILES] if -count * 2 >= len(rare)]
    return [path, *enough]


def _definitions(tree: Tree, path: str) -> Iterator[tuple[str, Definition]]:
    """Yield every definition of a file with its qualified name; none if it cannot be parsed."""
    data = tree.read(path)
    if data is None:
        return
    try:
        module = parse(decode(data, path), path)
    except CppmegaError:
        return
    pending: list[tuple[str, ast.AST]] = [("", module)]
    while pending:
        prefix, scope = pending.pop()
        for node in definitions(scope):
            yield prefix + node.name, node
            pending.append((f"{prefix}{node.name}.", node))


def _likeness(lines: Sequence[str], words: set[str], node: Definition, enough: float) -> float:
    """Return the share of words that both have in common, in the same order; 0 below `enough`."""
    theirs = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    theirs |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    # With few names in common, the slow comparison is not worthwhile.
    if len(theirs & words) * 3 < min(len(theirs), len(words)):
        return 0.0
    ours = _WORD.findall("\n".join(lines))
    other = _WORD.findall("\n".join(statements.of_definition(node)))
    matcher = SequenceMatcher(None, ours, other, autojunk=False)
    if matcher.real_quick_ratio() < enough or matcher.quick_ratio() < enough:
        return 0.0
    return matcher.ratio()
