"""Python files as text: decode without changing a byte, find one symbol, cut it out.

A symbol names a definition, or a statement of a module or a class by a name that it assigns or
imports: `CONSTANT`, `Class.field`, `import.NAME`.

Locating uses `ast` on the whole file (fast); only the slice of the symbol is passed to libcst.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cppmega.errors import CppmegaError

_COUNT = re.compile(r"#\d+")
_LINES = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Text:
    """A decoded file that encodes back to the same bytes."""

    lines: tuple[str, ...]
    encoding: str
    newline: str

    @property
    def body(self) -> str:
        return "".join(self.lines)

    def encode(self, body: str, name: str) -> bytes:
        """Convert text to bytes in the file's own encoding."""
        try:
            return body.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise CppmegaError(
                "text-not-encodable",
                f"{name} is stored as {self.encoding}, which lacks {error.object[error.start]!r}.",
                "Writing it in another encoding would change every line of the file.",
                "keep the patch's text within the encoding of the file it edits",
            ) from None


@dataclass(frozen=True, slots=True)
class Span:
    """Lines of one symbol, decorators included: 0-based, end excluded."""

    start: int
    end: int
    top: int
    """First line of the top-level statement that holds it."""


def decode(data: bytes, name: str) -> Text:
    """Decode the bytes of a Python file, and keep its line ends.

    Raises:
        CppmegaError: `unreadable-file`, if the bytes are not text in the declared encoding.
    """
    try:
        plain = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data
        encoding, _ = tokenize.detect_encoding(io.BytesIO(plain).readline)
        body = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise unreadable(name, str(error)) from None
    if body.encode(encoding, errors="replace") != data:
        raise unreadable(name, f"as {encoding} it does not encode back to the same bytes")
    lines = lines_of(body)
    return Text(lines, encoding, _line_end(lines) if "\r" in body else "\n")


def lines_of(body: str) -> tuple[str, ...]:
    """The lines of a text with their line ends."""
    return tuple(_LINES.findall(body))


def _line_end(lines: Sequence[str]) -> str:
    """The most frequent line end."""
    ends = [line[len(line.rstrip("\r\n")) :] for line in lines]
    return max(("\n", "\r\n", "\r"), key=ends.count)


def unreadable(name: str, reason: str) -> CppmegaError:
    """Create the error for a file that cannot be read as Python."""
    return CppmegaError(
        "unreadable-file",
        f"{name} cannot be read as Python: {reason}.",
        "A truncated or foreign file can be neither patched nor trusted in training.",
        "save what was edited there, reinstall the package it belongs to, then run "
        "`python -m cppmega.apply_patches`",
    )


def parse(text: Text, name: str) -> ast.Module:
    """Parse a file; one that is not Python is a named error."""
    try:
        return parse_silently(text.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise unreadable(name, str(error)) from None


def parse_silently(body: str) -> ast.Module:
    """Parse without warnings: upstream's invalid escapes must not fail under `-W error`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(body)


def definitions(tree: ast.AST) -> Iterator[Definition]:
    """Yield functions and classes of one scope, including those below if, try, with and loops."""
    pending = blocks(tree)[::-1]
    while pending:
        node = pending.pop()
        if isinstance(node, Definition):
            yield node
        else:
            pending += blocks(node)[::-1]


def blocks(node: ast.AST) -> list[ast.AST]:
    """The statements, handlers and cases directly below a node, in the order of the text."""
    return [inner for name in node._fields if name in _BLOCKS for inner in getattr(node, name)]


_BLOCKS = {"body", "orelse", "finalbody", "handlers", "cases"}


def find(tree: ast.Module, symbol: str) -> list[ast.stmt]:
    """Return everything that a symbol names; the caller refuses more than one.

    `name#2` is the second of several: upstream defines some functions once for every branch of an
    `if HAVE_TE`, and a page must state which of them it edits.

    A name without a definition is that of the statements, directly in the module or the class, that
    assign it. So a `try` block of imports has the name of its flag. `import.NAME` is the statement
    of the module that imports the name, and may be such a block, too.
    """
    *holders, last = symbol.split(".")
    imports = holders == [IMPORT]
    scopes: list[Any] = [tree]
    for part in [] if imports else holders:
        scopes = _counted([d for s in scopes for d in definitions(s)], part, _name)
    if not imports:
        found = _counted([d for s in scopes for d in definitions(s)], last, _name)
        if found:
            return found
    inside = [s for scope in scopes if not isinstance(scope, _FUNCTIONS) for s in scope.body]
    return _counted(inside, last, _imported if imports else assigned)


IMPORT = "import"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _counted(nodes: Sequence[Any], part: str, names: Callable[[Any], Container[str]]) -> list[Any]:
    """The nodes that have the name of one part of a symbol."""
    name, _, nth = part.partition("#")
    found = [node for node in nodes if name in names(node)]
    return found[int(nth) - 1 : int(nth)] if nth else found


def _name(definition: Definition) -> tuple[str]:
    return (definition.name,)


def assigned(statement: ast.stmt) -> set[str]:
    """The names that a statement assigns in its own scope."""
    stored = (node for node in in_scope(statement) if isinstance(node, ast.Name))
    return {node.id for node in stored if isinstance(node.ctx, ast.Store)}


def _imported(statement: ast.stmt) -> set[str]:
    inner = (n for n in in_scope(statement) if isinstance(n, ast.Import | ast.ImportFrom))
    aliases = (alias for node in inner for alias in node.names)
    return {(alias.asname or alias.name).partition(".")[0] for alias in aliases}


def statement_symbols(tree: ast.Module) -> set[str]:
    """The symbols of the statements directly in a module."""
    statements = [one for one in tree.body if not isinstance(one, Definition)]
    imports = {f"{IMPORT}.{name}" for one in statements for name in _imported(one)}
    return imports.union(*map(assigned, statements))


def in_scope(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, except those of definitions and comprehensions in it."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        if not isinstance(node, _OWN_SCOPE):
            yield node
            pending += ast.iter_child_nodes(node)


_OWN_SCOPE = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def plain(symbol: str) -> str:
    """Return the symbol's name in Python, without the counts."""
    return _COUNT.sub("", symbol)


def span(tree: ast.Module, text: Text, node: ast.stmt) -> Span:
    """The lines of a symbol, from its first decorator to its last line."""
    start = first_line(node, text)
    end = node.end_lineno or node.lineno
    top = next(
        statement
        for statement in tree.body
        if statement.lineno <= node.lineno <= (statement.end_lineno or 0)
    )
    first = start if top is node else first_line(top, text)
    return Span(start - 1, end, first - 1)


def first_line(statement: ast.stmt, text: Text) -> int:
    """The first line of a statement, its decorators included; counted from 1."""
    decorators = getattr(statement, "decorator_list", None)
    start = decorators[0].lineno if decorators else statement.lineno
    while decorators and not text.lines[start - 1].lstrip().startswith("@"):
        start -= 1  # `@` and its expression may be on two lines joined by a backslash
    return int(start)


def shares_its_lines(text: Text, node: ast.stmt, where: Span) -> bool:
    """Whether other code is on the symbol's lines, as in `if x: y; z = 1` or `a = 1; b = 2`."""
    head = text.lines[where.start].encode()
    if not getattr(node, "decorator_list", None) and head[: node.col_offset].strip():
        return True
    tail = text.lines[where.end - 1].encode()[node.end_col_offset or 0 :]
    rest = tail.strip().removeprefix(b";").strip()
    return bool(rest) and not rest.startswith(b"#")
