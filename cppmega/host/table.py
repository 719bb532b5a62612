"""Rows of text in columns, without a library that takes longer to import than a command runs.

On a terminal, every line ends before its edge. In a pipe or a file, rows and sentences stay on one
line each.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

import click

from cppmega.host.console import Style, styled, terminal_width

_LABEL = re.compile(r"(?:what|why): +")
_LEADING = re.compile(r" *(?:\w[\w. ]{0,14}: +|\S+  +)?")
"""The beginning of a line, which further lines are indented by."""
_COMMAND = re.compile(
    r"next: +(?=(?:cppmega|python|pip|export|git|mv|cp|torchrun|scripts/|CPPMEGA_\w+=)\b)"
)
_WORD = re.compile(r"(?:'[^']*'|[^\s'])+")
"""A word of a shell's command line."""
_STYLED = re.compile(r"((?:\x1b\[[\d;]+m)+)(.*?)(\x1b\[0m)")
_NARROW = 30
"""Columns that a long text needs beside others; with fewer, it is below them."""
_BELOW = 4
"""The indent of what is below."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table, with the style of its first cell."""

    cells: tuple[str, ...]
    style: Style | None = None


def table(
    rows: Iterable[Row],
    widths: Collection[int] = (),
    right: Collection[int] = (),
    indent: int = 0,
) -> Iterator[str]:
    """Lay out rows in columns, two spaces apart.

    Each column is as wide as its widest cell, except that the last cell of a row takes the rest of
    the line; further lines of a text in it are indented to its column. On a terminal its sentences
    are wrapped there, too, and columns that do not fit are below the first ones.

    Args:
        widths: the minimum widths of the first columns.
        right: the columns that are aligned to the right.
        indent: spaces before every row.
    """
    laid = list(rows)
    columns = (row.cells[:-1] for row in laid)
    texts = zip_longest(*columns, fillvalue="")
    most = [max(map(len, column)) for column in texts]
    least = [max(pair) for pair in zip_longest(most, widths, fillvalue=0)]
    longest: dict[int, int] = {}
    for row in laid:
        longest[len(row.cells)] = max(longest.get(len(row.cells), 0), _length(row))
    for row in laid:
        column = longest[len(row.cells)]
        need = column if column <= _NARROW else min(_length(row), _NARROW)
        yield _laid(row, least, need, right, indent)


def _length(row: Row) -> int:
    return max(map(len, row.cells[-1].split("\n")))


def _laid(row: Row, widths: list[int], need: int, right: Collection[int], indent: int) -> str:
    """Lay out a row, whose last cell needs a number of columns."""
    end, at = terminal_width(), indent
    laid = " " * at
    for column, cell in enumerate(row.cells):
        is_last = column == len(row.cells) - 1
        width = need if is_last else widths[column]
        if end is not None and at + width > end and at > indent + _BELOW:
            before, _, line = laid.rpartition("\n")
            above = laid if line.strip() else before  # of empty cells, no line remains
            at = indent + _BELOW
            laid = above + "\n" * bool(above) + " " * at
        if is_last:
            text = ("\n" + " " * at).join(_wrapped(part, at, end) for part in cell.split("\n"))
        elif end is not None and at + width > end:
            text = _wrapped(cell, at, end)
        else:
            text = f"{cell:>{width}}" if column in right else f"{cell:<{width}}"
        laid += text if column or is_last else styled(text, row.style)
        laid += "  "
        at += width + 2
    return "\n".join(map(str.rstrip, laid.split("\n")))


def _wrapped(text: str, at: int, end: int | None, hanging: int = 0) -> str:
    """Wrap a text that begins in the column `at`; further lines have the indent `hanging` there."""
    if end is None or at + len(text) <= end:
        return text
    if _COMMAND.match(text):
        return _continued(text, at, end)
    if label := _LABEL.match(text):
        hanging = len(label[0])
    lines = textwrap.wrap(
        text, max(end - at, 1), subsequent_indent=" " * hanging, break_on_hyphens=False
    )
    return ("\n" + " " * at).join(lines)


def _continued(text: str, at: int, end: int) -> str:
    """Wrap a command as a shell continues it, so that it can be copied."""
    first, *words = _WORD.findall(text)
    lines, line = list[str](), " " * at + first
    for number, word in enumerate(words, 1):
        room = end - 2 * (number < len(words))
        if number > 1 and len(line) + 1 + len(word) > room:
            lines.append(line + " \\")
            line = " " * (at + len(first))
        line += " " + word
        while len(line) > room:
            lines.append(line[: end - 1] + "\\")
            line = line[end - 1 :]
    return "\n".join([*lines, line])[at:]


def fitted(text: str) -> str:
    """Wrap the lines of a text that are longer than the terminal on stdout."""
    end = terminal_width()
    return text if end is None else "\n".join(_fitted(line, end) for line in text.split("\n"))


def _fitted(line: str, end: int) -> str:
    plain = click.unstyle(line)
    if len(plain) <= end:
        return line
    text = plain.lstrip(" ")
    leading, beginning = len(plain) - len(text), _LEADING.match(plain)
    hanging = len(beginning[0]) if beginning is not None else 0
    if end - hanging < _NARROW:
        leading, hanging = min(leading, _BELOW), _BELOW
    if _COMMAND.match(text):
        return " " * leading + _continued(text, leading, end)
    wrapped = _wrapped(" " * leading + text, 0, end, hanging)
    if styled_part := _STYLED.search(line):
        code, part, reset = styled_part.groups()
        part = part.strip() if part.strip() in wrapped else wrapped
        wrapped = wrapped.replace(part, f"{code}{part}{reset}", 1)
    return wrapped


def put(text: str) -> None:
    """Print a text on stdout, fitted to its terminal."""
    click.echo(fitted(text))


def show(lines: Iterable[str]) -> None:
    """Print the lines of a table, or of what is like one, as `put` does."""
    for line in lines:
        put(line)
