"""Add a pin to the text of a page: one entry in a literal dict, and nothing else."""

from __future__ import annotations

import ast
import itertools
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from cppmega.catalogue.loader import SUBJECTS, catalogue_of, load_page
from cppmega.errors import CppmegaError
from cppmega.page import Page

_WIDTH = 100
_COPIES = itertools.count()


class PinsNotFoundError(CppmegaError):
    """The page does not write the pins of an edit as a separate literal dict."""


def copy_with(page: Page, data: bytes, scratch: Path) -> Page:
    """Load a copy of the page that has this text, next to copies of the modules that pages share.

    Every copy gets its own folder, because Python would otherwise reuse the bytecode of another
    copy.

    Raises:
        CppmegaError: what `load_page` raises.
    """
    source = Path(page.path)
    folder = scratch / f"page-{next(_COPIES)}"
    folder.mkdir(parents=True)
    own = source.parent if source.stem == "__init__" else source
    above = catalogue_of(source)
    shared = [entry for home in {above, own.parent} for entry in home.glob("_[!_]*")]
    for entry in [own, *shared]:
        copy = folder / entry.relative_to(above)
        copy.parent.mkdir(exist_ok=True)
        if entry.is_dir():
            shutil.copytree(entry, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(entry, copy)
    if above != own.parent:
        (folder / SUBJECTS).write_text(f'{own.parent.name} = ""\n')
    place = folder / source.relative_to(above)
    place.write_bytes(data)
    return load_page(page.name, place, page.catalogue)


def with_pins(page: Page, wanted: Mapping[int, str], version: str) -> bytes:
    """Return the page's text with a pin of one version for some of its edits.

    Args:
        wanted: index of the edit -> fingerprint.

    Raises:
        PinsNotFoundError: `pins-not-found`.
    """
    data = Path(page.path).read_bytes()
    places = {index: _place(page, data, index) for index in wanted}
    missing = [index for index, place in places.items() if place is None]
    if missing:
        raise _not_found(page, {index: wanted[index] for index in missing}, version)
    extended = [(place, wanted[index]) for index, place in places.items() if place is not None]
    for place, pin in sorted(extended, key=lambda entry: -_span(data, entry[0])[0]):
        data = _extended(data, place, f'"{version}": "{pin}"')
    return data


def _place(page: Page, data: bytes, index: int) -> ast.Dict | None:
    """Find the literal dict with the pins of one edit.

    Edits that have equal pins are distinguished by their order.
    """
    pins = page.patch.edits[index].pins
    equal = [at for at, edit in enumerate(page.patch.edits) if dict(edit.pins) == dict(pins)]
    places = [node for node in _dicts(data) if ast.literal_eval(node) == pins]
    return places[equal.index(index)] if len(places) == len(equal) else None


def _dicts(data: bytes) -> Iterator[ast.Dict]:
    """Yield the literal dicts of a text that may hold pins, in the order of the text."""
    nodes = [node for node in ast.walk(ast.parse(data)) if isinstance(node, ast.Dict)]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        if node.keys and all(isinstance(n, ast.Constant) for n in (*node.keys, *node.values)):
            yield node


def _not_found(page: Page, missing: Mapping[int, str], version: str) -> PinsNotFoundError:
    lines = [
        f'"{version}": "{pin}" to the pins of {page.patch.edits[index].target}'
        for index, pin in missing.items()
    ]
    return PinsNotFoundError(
        "pins-not-found",
        f"{page.path} does not write these pins as a literal dict of each edit.",
        "This command extends nothing else. Nothing was written.",
        "add by hand " + ", and ".join(lines),
    )


def _extended(data: bytes, node: ast.Dict, entry: str) -> bytes:
    """Return the text with one more entry in a dict, laid out as the formatter would."""
    last = _span(data, node.values[-1])[1]
    if node.lineno != node.end_lineno:
        between = b"," + _newline(data) + _indent(data, last)
        return data[:last] + between + entry.encode() + data[last:]
    extended = data[:last] + b", " + entry.encode() + data[last:]
    line = extended.splitlines()[node.lineno - 1]
    return extended if len(line.decode()) <= _WIDTH else _broken(data, node, entry)


def _broken(data: bytes, node: ast.Dict, entry: str) -> bytes:
    """Return the text with one line per entry of a dict that no longer fits on one line."""
    start, end = _span(data, node)
    opening, *entries = data[start : end - 1].replace(b"{", b"{, ", 1).split(b", ")
    outer = _indent(data, start)
    lines = [opening, *(outer + b"    " + e.rstrip(b", ") + b"," for e in entries if e.strip())]
    lines += [outer + b"    " + entry.encode() + b",", outer + b"}"]
    return data[:start] + _newline(data).join(lines) + data[end:]


def _span(data: bytes, node: ast.expr) -> tuple[int, int]:
    """Return where a node begins and ends, in bytes."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    lines = data.splitlines(keepends=True)
    before = [sum(map(len, lines[: number - 1])) for number in (node.lineno, node.end_lineno)]
    return before[0] + node.col_offset, before[1] + node.end_col_offset


def _indent(data: bytes, place: int) -> bytes:
    """Return the indentation of the line at an offset."""
    line = data[data.rfind(b"\n", 0, place) + 1 :]
    return line[: len(line) - len(line.lstrip(b" "))]


def _newline(data: bytes) -> bytes:
    return b"\r\n" if b"\r\n" in data else b"\n"
