"""Annotations of GitHub Actions: one workflow command per entry, each on its own line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from cppmega.cli.reports.entries import Entry, Report, Result

_LEVELS: Mapping[Result, str] = {
    "note": "notice",
    "warning": "warning",
    "failed": "error",
    "error": "error",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Control characters other than tabs and line ends; they would color or overwrite the log."""


def written(report: Report, folder: Path) -> str:
    """The annotations of every entry that needs a reader's attention.

    Args:
        folder: the working directory of the job; GitHub shows only places below it.
    """
    return "".join(f"{line}\n" for line in _lines(report, folder))


def _lines(report: Report, folder: Path) -> Iterator[str]:
    for entry in report.remarkable():
        title = f"cppmega {report.command}: {entry.name} ({entry.rule})"
        properties = {**_shown_at(entry, folder), "title": title}
        words = ",".join(f"{name}={in_property(value)}" for name, value in properties.items())
        yield f"::{_LEVELS[entry.result]} {words}::{in_message(entry.text)}"


def _shown_at(entry: Entry, folder: Path) -> dict[str, str]:
    """The code that the patch edits, or the page itself if only that is in the repository."""
    place = entry.place
    if place is not None and place.file.is_relative_to(folder):
        line = {"line": str(place.line)} if place.line is not None else {}
        return {"file": place.file.relative_to(folder).as_posix(), **line}
    if entry.page is not None and entry.page.is_relative_to(folder):
        return {"file": entry.page.relative_to(folder).as_posix()}
    return {}


def in_message(text: str) -> str:
    """Escape a text for the message of a workflow command."""
    plain = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
    return plain.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def in_property(text: str) -> str:
    """Escape a text for a property, in which a colon and a comma have a meaning as well."""
    return in_message(text).replace(":", "%3A").replace(",", "%2C")
