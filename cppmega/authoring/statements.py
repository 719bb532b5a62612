"""Symbols as lists of statements, and the differences between two of them.

Comments, docstrings and layout are left out. The parameters of a function and the bases of a class
count as separate statements, so that an added parameter is one line of a long signature.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

import msgspec

from cppmega.rewriting.source import Definition, parse_silently

Meets = Literal["replaced", "beside", "elsewhere", "unknown"]
"""How a change of upstream meets an edit of the page: within the statements that the edit replaces,
next to them, elsewhere in the target, or unknown."""

_ORDER: tuple[Meets, ...] = ("unknown", "elsewhere", "beside", "replaced")


class StatementChange(msgspec.Struct, frozen=True):
    """A run of statements that differ."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    after: str
    """The statement before it, for orientation; "" at the top."""
    meets: Meets = "unknown"


@dataclass(frozen=True, slots=True)
class Touched:
    """The statements that an edit replaces, and the places where it inserts."""

    lines: frozenset[int] = frozenset()
    gaps: frozenset[int] = frozenset()
    """Indices of the statements before which the edit inserts."""
    inserted: frozenset[str] = frozenset()


def of_source(source: str) -> list[str]:
    """Return the statements of a symbol, given as its lines at any indentation."""
    wrapped = source.startswith((" ", "\t"))
    body: list[Any] = parse_silently(f"if 1:\n{source}" if wrapped else source).body
    body = body[0].body if wrapped else body
    if isinstance(body[0], Definition):
        return of_definition(body[0])
    return [line for statement in body for line in ast.unparse(statement).splitlines()]


def of_definition(node: Definition) -> list[str]:
    """Return the statements of a definition; its docstrings are removed from the node."""
    for inner in ast.walk(node):
        if isinstance(inner, Definition) and ast.get_docstring(inner, clean=False) is not None:
            inner.body = inner.body[1:] or [ast.copy_location(ast.Pass(), inner.body[0])]
    lines = [f"@{ast.unparse(decorator)}" for decorator in node.decorator_list]
    if isinstance(node, ast.ClassDef):
        lines.append(f"class {node.name}")
        lines += [f"base {ast.unparse(base)}" for base in (*node.bases, *node.keywords)]
    else:
        word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        lines.append(f"{word} {node.name}")
        lines += _parameters(node.args)
        if node.returns is not None:
            lines.append(f"returns {ast.unparse(node.returns)}")
    body = "\n".join(ast.unparse(statement) for statement in node.body)
    return lines + body.splitlines()


def _parameters(arguments: ast.arguments) -> list[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    defaults: list[ast.expr | None] = [*([None] * missing), *arguments.defaults]
    lines = [_parameter(p, d) for p, d in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        lines.insert(len(arguments.posonlyargs), "parameter /")
    if arguments.vararg is not None:
        lines.append("parameter *" + ast.unparse(arguments.vararg))
    elif arguments.kwonlyargs:
        lines.append("parameter *")
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    lines += [_parameter(p, d) for p, d in named]
    if arguments.kwarg is not None:
        lines.append("parameter **" + ast.unparse(arguments.kwarg))
    return lines


def _parameter(parameter: ast.arg, default: ast.expr | None) -> str:
    value = "" if default is None else f" = {ast.unparse(default)}"
    return f"parameter {ast.unparse(parameter)}{value}"


def touched(before: Sequence[str], after: Sequence[str]) -> Touched:
    """Return what an edit did that turned `before` into `after`."""
    lines: set[int] = set()
    gaps: set[int] = set()
    inserted: set[str] = set()
    for tag, i, k, j, m in _opcodes(before, after):
        lines |= set(range(i, k))
        gaps |= {i} if tag == "insert" else set()
        inserted |= {text.strip() for text in after[j:m]}
    return Touched(frozenset(lines), frozenset(gaps), frozenset(inserted))


def carried(edit: Touched, before: Sequence[str], pristine: Sequence[str]) -> Touched:
    """Return what an edit touches of upstream's statements after other edits were made.

    Changes of statements that the other edits inserted are not included.

    Args:
        edit: what the edit does to the statements that the others left.
        before: these statements.
        pristine: the statements of upstream.
    """
    matcher = SequenceMatcher(None, before, pristine, autojunk=False)
    place = {i + n: j + n for i, j, size in matcher.get_matching_blocks() for n in range(size)}
    place[len(before)] = len(pristine)
    lines = frozenset(place[at] for at in edit.lines if at in place)
    gaps = frozenset(place[at] for at in edit.gaps if at in place)
    return Touched(lines, gaps, edit.inserted)


def changes(
    old: Sequence[str],
    new: Sequence[str],
    on_old: Touched | None = None,
    on_new: Touched | None = None,
) -> list[StatementChange]:
    """Return what upstream changed, and how each change meets the edit.

    Args:
        old: the old statements.
        new: the new statements.
        on_old: what the edit does to the old statements.
        on_new: what it does to the new statements, if it still applies. Both are used, because an
            edit that replaces the complete body undoes changes that it does not mention.
    """
    listed = []
    for _, i, k, j, m in _opcodes(old, new):
        meets: Meets = "unknown"
        if on_old is not None:
            meets = _meets(on_old, i, k, new[j:m])
        if on_new is not None:
            meets = max(meets, _meets(on_new, j, m, old[i:k]), key=_ORDER.index)
        after = old[i - 1].strip() if i else ""
        listed.append(StatementChange(tuple(old[i:k]), tuple(new[j:m]), after, meets))
    return listed


def _meets(edit: Touched, start: int, end: int, other: Sequence[str]) -> Meets:
    """Return how the statements from `start` to `end` meet an edit of the same list.

    Args:
        other: the statements on the other side of the change. If the edit inserts them here, it
            repeats what upstream did, or undoes it.
    """
    if any(at in edit.lines for at in range(start, end)):
        return "replaced"
    same_again = any(text.strip() in edit.inserted for text in other)
    neighbours = start - 1 in edit.lines, end in edit.lines
    if start == end and (all(neighbours) or (any(neighbours) and same_again)):
        return "replaced"
    if any(start <= gap <= end for gap in edit.gaps):
        return "replaced" if same_again else "beside"
    return "beside" if any(neighbours) else "elsewhere"


def _opcodes(
    old: Sequence[str], new: Sequence[str]
) -> list[tuple[Literal["replace", "delete", "insert", "equal"], int, int, int, int]]:
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    return [code for code in matcher.get_opcodes() if code[0] != "equal"]
