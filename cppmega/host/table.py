"""Rows of text in columns; rich would take longer to import than most commands take to run."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from cppmega.host.console import Style, styled, terminal_width

_LABEL = re.compile(r"(?:what|why): +")
_COMMAND = "next:"
_NARROW = 30
"""Columns below which wrapping is left to the terminal."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table, with the style of its first cell."""

    cells: tuple[str, ...]
    style: Style | None = None


def table(
    rows: Iterable[Row], widths: Collection[int] = (), right: Collection[int] = ()
) -> Iterator[str]:
    """Lay out rows in columns, two spaces apart.

    Each column is as wide as its widest cell, except that the last cell of a row takes the rest of
    the line; further lines of a text in it are indented to its column. On a terminal its sentences
    are wrapped there, too.

    Args:
        widths: the minimum widths of the first columns.
        right: the columns that are aligned to the right.
    """
    laid = list(rows)
    columns = (row.cells[:-1] for row in laid)
    texts = zip_longest(*columns, fillvalue="")
    most = [max(map(len, column)) for column in texts]
    least = [max(pair) for pair in zip_longest(most, widths, fillvalue=0)]
    for row in laid:
        yield _line(row, least, right)


def _line(row: Row, widths: list[int], right: Collection[int]) -> str:
    *padded, last = row.cells
    cells = [
        f"{cell:>{width}}" if column in right else f"{cell:<{width}}"
        for column, (cell, width) in enumerate(zip(padded, widths, strict=False))
    ]
    indent = sum(len(cell) + 2 for cell in cells)
    first = [styled(cell, row.style) if column == 0 else cell for column, cell in enumerate(cells)]
    lines = [part for text in last.split("\n") for part in _wrapped(text, indent)]
    return "  ".join([*first, ("\n" + " " * indent).join(lines)]).rstrip()


def _wrapped(text: str, indent: int) -> list[str]:
    """Wrap a text to the terminal; commands stay on one line, so that they can be copied."""
    width = terminal_width()
    if width is None or width - indent < _NARROW or text.startswith(_COMMAND):
        return [text]
    label = _LABEL.match(text)
    hanging = " " * len(label[0]) if label is not None else ""
    lines = textwrap.wrap(
        text,
        width - indent,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [text]
