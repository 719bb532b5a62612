"""Python files as text: decode without changing a byte, find one symbol, cut it out.

Locating uses `ast` on the whole file (fast); only the slice of the symbol is ever given to libcst.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
        """Text to bytes in the file's own encoding."""
        try:
            return body.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise CppmegaError(
                "text-not-encodable",
                f"{name} is stored as {self.encoding}, which has no {error.object[error.start]!r}.",
                "Writing it in another encoding would change every line of the file.",
                "keep the patch's text within the encoding of the file it edits",
            ) from None


@dataclass(frozen=True, slots=True)
class Span:
    """Lines of one definition, decorators included: 0-based, end excluded."""

    start: int
    end: int
    top: int
    """First line of the top-level statement that holds the definition."""


def decode(data: bytes, name: str) -> Text:
    """Bytes of a Python file to text, line ends kept.

    Raises:
        CppmegaError: `unreadable-python`, when the bytes are not a text in the declared encoding.
    """
    try:
        plain = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data
        encoding, _ = tokenize.detect_encoding(io.BytesIO(plain).readline)
        body = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise unreadable(name, str(error)) from None
    if body.encode(encoding, errors="replace") != data:
        raise unreadable(name, f"as {encoding} it does not encode back to the same bytes")
    lines = tuple(_LINES.findall(body))
    return Text(lines, encoding, _line_end(lines) if "\r" in body else "\n")


def _line_end(lines: Sequence[str]) -> str:
    """The line end that most lines have."""
    ends = [line[len(line.rstrip("\r\n")) :] for line in lines]
    return max(("\n", "\r\n", "\r"), key=ends.count)


def unreadable(name: str, reason: str) -> CppmegaError:
    """A file that is not Python: half written, or never meant to be."""
    return CppmegaError(
        "unreadable-python",
        f"{name} cannot be read as Python: {reason}.",
        "A torn or foreign file can be neither patched nor trusted to train.",
        "reinstall the package it belongs to, then run `python -m cppmega.apply_patches`",
    )


def parse(text: Text, name: str) -> ast.Module:
    """The syntax tree of a file; a torn file is a named error."""
    try:
        return parse_silently(text.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise unreadable(name, str(error)) from None


def parse_silently(body: str) -> ast.Module:
    """Invalid escapes of upstream's are no news to the user, and no error under `-W error`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(body)


def definitions(tree: ast.AST) -> Iterator[Definition]:
    """Functions and classes of one scope, also those below if, try, with, for and while."""
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


def find(tree: ast.Module, symbol: str) -> list[Definition]:
    """Every definition with that qualified name; more than one is the caller's to refuse.

    `name#2` is the second of several: upstream defines some functions once for every branch of an
    `if HAVE_TE`, and a page must say which of them it means.
    """
    scopes: list[ast.AST] = [tree]
    for part in symbol.split("."):
        name, _, nth = part.partition("#")
        scopes = [node for scope in scopes for node in definitions(scope) if node.name == name]
        if nth:
            scopes = scopes[int(nth) - 1 : int(nth)]
    return scopes  # type: ignore[return-value]


def plain(symbol: str) -> str:
    """The name that Python knows the symbol by, without the count after it."""
    return _COUNT.sub("", symbol)


def span(tree: ast.Module, text: Text, node: Definition) -> Span:
    """The lines of a definition, from its first decorator to its last line."""
    start = node.lineno
    if node.decorator_list:
        start = node.decorator_list[0].lineno
        while not text.lines[start - 1].lstrip().startswith("@"):
            start -= 1  # `@` and its expression may be on two lines joined by a backslash
    end = node.end_lineno or node.lineno
    top = next(
        statement
        for statement in tree.body
        if statement.lineno <= node.lineno <= (statement.end_lineno or 0)
    )
    first = start if top is node else _first_line(top, text)
    return Span(start - 1, end, first - 1)


def _first_line(statement: ast.stmt, text: Text) -> int:
    decorators = getattr(statement, "decorator_list", None)
    start = decorators[0].lineno if decorators else statement.lineno
    while decorators and not text.lines[start - 1].lstrip().startswith("@"):
        start -= 1
    return int(start)


def shares_its_lines(text: Text, node: Definition, where: Span) -> bool:
    """True where the definition does not own its lines, as in `if x: y; class A: pass`."""
    head = text.lines[where.start]
    lead = head[: len(head) - len(head.lstrip())]
    if not node.decorator_list and not head.lstrip().startswith(("def", "async", "class")):
        return True
    tail = text.lines[where.end - 1].rstrip("\r\n")
    column = node.end_col_offset or 0
    rest = tail.encode()[column:].decode(errors="replace").strip()
    return bool(lead.strip()) or bool(rest and not rest.startswith(("#", ";")))
