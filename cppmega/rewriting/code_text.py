"""The code of a Python file without its comments and docstrings, and what that code reaches.

The bare text is cut out of the source rather than printed from a syntax tree, so it is the same on
every version of Python. Results are cached by the bytes of a file for the life of the process; to
keep them across processes, pass the result of `known` to `remember`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

LENGTH = 16
"""Hex digits kept of a hash."""
PACKAGE = "cppmega"

_MODULE = re.compile(rf"{PACKAGE}(\.[A-Za-z_]\w*)+\Z")
_FILE_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*\Z")
_READERS = {
    *("__doc__", "getdoc", "getsource", "getsourcelines", "getsourcefile"),
    *("findsource", "getcomments", "linecache"),
}
"""Names with which code reads docstrings or source, which are then part of its behavior."""
_LITERAL = re.compile(
    r"#[^\n]*"
    r'|"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'",
    re.DOTALL,
)
"""A comment, or a string without its prefix."""
_TELLING = re.compile(rf"""__file__|{"|".join(_READERS)}|["']{PACKAGE}""")
"""Matches only names and strings of interest; few files contain any."""
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_OPENING = {"FSTRING_START", "TSTRING_START"}
_CLOSING = {"FSTRING_END", "TSTRING_END"}

_Cut = tuple[int, int, int | None, str]
"""Row, first column, the column after the last (None: the end of the row), and the replacement."""


class Code(msgspec.Struct, frozen=True, array_like=True):
    """Facts about the code of one Python file; an array in JSON."""

    bare: str
    """Hash of the text without comments and docstrings; of all bytes if it cannot be parsed."""
    imports: tuple[str, ...] = ()
    """Modules of this package that the code names, even lazily; relative ones keep their dots."""
    loads: tuple[str, ...] = ()
    """Packages that the code imports at top level."""
    beside: tuple[str, ...] = ()
    """Literals that may name a file, if the code uses `__file__`."""
    reads_text: bool = False
    """Whether the code reads docstrings or source."""


_known: dict[str, Code] = {}
_used: set[str] = set()


def code_of(data: bytes) -> Code:
    """Return the facts about a file's code, computed once for the same bytes."""
    key = hashlib.sha256(data).hexdigest()
    _used.add(key)
    if key not in _known:
        _known[key] = _read(data)
    return _known[key]


def remember(answers: Mapping[str, Any]) -> None:
    """Adopt what `known` returned in another process, if the rules were the same."""
    if answers.get("rules") != rules():
        return
    for key, row in answers.items():
        with contextlib.suppress(msgspec.ValidationError):  # the key "rules", or an edited entry
            _known.setdefault(key, msgspec.convert(row, Code))


def known() -> dict[str, Any]:
    """Return every result that this process needed, for a JSON file."""
    answers = {key: _known[key] for key in sorted(_used & _known.keys())}
    return {"rules": rules(), **answers}


@functools.cache
def rules() -> str:
    """Return the hash of this module, since other rules give other results."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:LENGTH]


def _read(data: bytes) -> Code:
    try:
        text = _decoded(data)
        tree = ast.parse(text)
        bare = _cut(text, tree)
    except (SyntaxError, ValueError, tokenize.TokenError):
        return Code(hashlib.sha256(data).hexdigest()[:LENGTH], reads_text=True)
    reached, names, literals = _facts(tree, text)
    return Code(
        hashlib.sha256(bare.encode()).hexdigest()[:LENGTH],
        tuple(sorted(reached)),
        tuple(sorted({name for node in tree.body for name in _loaded(node)})),
        tuple(sorted(filter(_FILE_NAME.match, literals))) if "__file__" in names else (),
        bool(names & _READERS),
    )


def imports_of(tree: ast.Module, text: str) -> tuple[str, ...]:
    """Modules of this package that the code of a file names, as in `Code.imports`."""
    return tuple(sorted(_facts(tree, text)[0]))


def bare(text: str) -> str:
    """Python text without its comments, docstrings and blank lines."""
    return _cut(text, ast.parse(text))


def _decoded(data: bytes) -> str:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return io.TextIOWrapper(io.BytesIO(data), encoding).read()


def _cut(text: str, tree: ast.Module) -> str:
    lines = text.split("\n")
    inside, cuts = _strings_and_comments(text)
    for statement, alone in _docstrings(tree):
        first, last = statement.lineno - 1, (statement.end_lineno or statement.lineno) - 1
        inside -= set(range(first, last))
        for row in range(first, last + 1):
            start = _column(lines[row], statement.col_offset) if row == first else 0
            stop = _column(lines[row], statement.end_col_offset or 0) if row == last else None
            cuts.append((row, start, stop, "pass" if alone and row == first else ""))
    for row, start, stop, instead in sorted(cuts, key=lambda cut: cut[:2], reverse=True):
        lines[row] = lines[row][:start] + instead + ("" if stop is None else lines[row][stop:])
    kept = (line if at in inside else line.rstrip() for at, line in enumerate(lines))
    return "".join(f"{line}\n" for at, line in enumerate(kept) if line or at in inside)


def _strings_and_comments(text: str) -> tuple[set[int], list[_Cut]]:
    """Rows whose end lies inside a string, and the cuts that remove the comments."""
    inside: set[int] = set()
    cuts: list[_Cut] = []
    row = at = 0
    for found in _LITERAL.finditer(text):
        literal = found[0]
        row += text.count("\n", at, found.start())
        at = found.start()
        if literal[0] == "#":
            cuts.append((row, at - text.rfind("\n", 0, at) - 1, None, ""))
        elif _may_hold_literals(literal, text[max(at - 2, 0) : at]):
            return _by_tokens(text)
        else:
            inside.update(range(row, row + literal.count("\n")))
    return inside, cuts


def _may_hold_literals(literal: str, before: str) -> bool:
    """Whether an f-string may hold strings or comments, so that it ends somewhere else.

    Args:
        before: the two characters before the quotes.
    """
    if not {*before} & {*"fFtT"}:
        return False
    body = literal.replace("{{", "").replace("}}", "")
    return body.count("{") != body.count("}") or ("{" in body and "#" in body)


def _by_tokens(text: str) -> tuple[set[int], list[_Cut]]:
    """The same with the tokenizer, which is correct for every text but ten times slower."""
    inside: set[int] = set()
    cuts: list[_Cut] = []
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind, (row, column), (end, _) = tokenize.tok_name[token.type], token.start, token.end
        if kind == "COMMENT":
            cuts.append((row - 1, column, None, ""))
        elif kind == "STRING":
            inside.update(range(row - 1, end - 1))
        elif kind in _OPENING:
            opened.append(row)
        elif kind in _CLOSING:
            inside.update(range(opened.pop() - 1, end - 1))
    return inside, cuts


def _column(line: str, offset: int) -> int:
    """Convert an offset of the syntax tree, which counts bytes."""
    return len(line.encode()[:offset].decode())


def _docstrings(tree: ast.Module) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the statement of every docstring, and whether its block holds nothing else."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            strings = [statement for statement in node.body if _is_string(statement)]
            whole = len(strings) == len(node.body) and not isinstance(node, ast.Module)
            # After the docstring, a string by itself documents the attribute before it.
            for statement in strings:
                yield statement, whole and statement is strings[0]
        for block in _BLOCKS:
            inner = getattr(node, block, ())
            pending += inner if isinstance(inner, list) else ()


def _is_string(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _facts(tree: ast.Module, text: str) -> tuple[set[str], set[str], set[str]]:
    """Modules of this package that the code names, its names, and its strings.

    Names and strings are searched only if the text has one of interest; there are ten times as many
    of them as statements.
    """
    modules: set[str] = set()
    names: set[str] = set()
    literals: set[str] = set()
    for node in _walk(tree) if _TELLING.search(text) else _statements(tree):
        kind = type(node)
        if kind is ast.Name:
            names.add(node.id)
        elif kind is ast.Attribute:
            names.add(node.attr)
        elif kind is ast.Constant and type(node.value) is str:
            literals.add(node.value)
        elif kind is ast.Import or kind is ast.ImportFrom:
            names |= {alias.name for alias in node.names}
            modules.update(_imported(node))
    modules.update(filter(_MODULE.match, literals))  # import_module, python -m
    return {name for name in modules if name.startswith((".", f"{PACKAGE}."))}, names, literals


def _statements(tree: ast.AST) -> Iterator[Any]:
    """Yield every statement, except those that only a type checker sees."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        hidden = type(node) is ast.If and _type_checking(node.test)
        for block in ("orelse",) if hidden else _BLOCKS:
            pending += getattr(node, block, ())


def _walk(tree: ast.AST) -> Iterator[Any]:
    """Yield every node that may hold facts, except those that only a type checker sees."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        kind = type(node)
        if kind in _LEAVES:
            continue
        if kind is ast.If and _type_checking(node.test):  # type: ignore[attr-defined]
            pending += node.orelse  # type: ignore[attr-defined]
            continue
        for name in kind._fields:
            value = getattr(node, name)
            if type(value) is list:
                pending += [child for child in value if isinstance(child, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, _WITHOUT_FACTS):
                pending.append(value)


_LEAVES = {ast.Name, ast.Constant}
_WITHOUT_FACTS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop)


def _type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Modules that an import may run; relative ones keep their dots."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    module = "." * node.level + (node.module or "")
    dot = "." if node.module else ""
    yield module
    yield from (f"{module}{dot}{alias.name}" for alias in node.names)


def _loaded(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield (node.module or "").partition(".")[0]
