"""SARIF 2.1.0, which code scanning and editors show next to the code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import msgspec

from cppmega import __version__
from cppmega.cli.reports.entries import Entry, Place, Report, Result

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
Level = Literal["note", "warning", "error"]
_LEVELS: Mapping[Result, Level] = {"note": "note", "warning": "warning", "failed": "error"}
_HERE, _MEGATRON = "%SRCROOT%", "MEGATRON"
"""The bases of paths in the working directory, and in the tree that holds megatron/."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An object of the format; a field that has its default is left out."""


class _Message(_Part, frozen=True, kw_only=True):
    text: str


class _ArtifactLocation(_Part, frozen=True, kw_only=True):
    uri: str
    uri_base_id: str | None = None


class _Region(_Part, frozen=True, kw_only=True):
    start_line: int


class _PhysicalLocation(_Part, frozen=True, kw_only=True):
    artifact_location: _ArtifactLocation
    region: _Region


class _Location(_Part, frozen=True, kw_only=True):
    id: int | None = None
    physical_location: _PhysicalLocation
    message: _Message | None = None


class _Rule(_Part, frozen=True, kw_only=True):
    id: str
    short_description: _Message


class _Result(_Part, frozen=True, kw_only=True):
    rule_id: str
    rule_index: int = -1
    level: Level
    message: _Message
    locations: tuple[_Location, ...]
    related_locations: tuple[_Location, ...] = ()
    partial_fingerprints: dict[str, str]
    properties: dict[str, str]


class _Driver(_Part, frozen=True, kw_only=True):
    name: str
    version: str
    rules: tuple[_Rule, ...]


class _Tool(_Part, frozen=True, kw_only=True):
    driver: _Driver


class _Notification(_Part, frozen=True, kw_only=True):
    level: Level
    message: _Message


class _Invocation(_Part, frozen=True, kw_only=True):
    execution_successful: bool
    tool_execution_notifications: tuple[_Notification, ...] = ()


class _Run(_Part, frozen=True, kw_only=True):
    tool: _Tool
    invocations: tuple[_Invocation, ...]
    original_uri_base_ids: dict[str, _ArtifactLocation]
    column_kind: str
    results: tuple[_Result, ...]


class _Log(_Part, frozen=True, kw_only=True):
    schema: str = msgspec.field(name="$schema")
    version: str
    runs: tuple[_Run, ...]


def written(report: Report, folder: Path) -> str:
    """One result for each entry that needs a reader's attention.

    Args:
        folder: the working directory; paths below it are relative to it, as code scanning
            requires for a file of the repository.
    """
    shown = [entry for entry in report.remarkable() if entry.result != "error"]
    errors = [entry for entry in report.entries if entry.result == "error"]
    rules = sorted({entry.rule for entry in shown})
    places = [entry.place for entry in shown if entry.place is not None]
    outside = [place.root for place in places if not place.file.is_relative_to(folder)]
    bases = {_HERE: folder, **({_MEGATRON: outside[0].absolute()} if outside else {})}
    run = _Run(
        tool=_Tool(driver=_driver(report, rules)),
        invocations=(_invocation(errors),),
        original_uri_base_ids={
            name: _ArtifactLocation(uri=base.as_uri() + "/") for name, base in bases.items()
        },
        column_kind="unicodeCodePoints",
        results=tuple(_result(entry, report, rules, folder) for entry in shown),
    )
    log = _Log(schema=_SCHEMA, version="2.1.0", runs=(run,))
    return msgspec.json.format(msgspec.json.encode(log), indent=2).decode() + "\n"


def _driver(report: Report, rules: list[str]) -> _Driver:
    described = (
        _Rule(id=rule, short_description=_message(report.meanings.get(rule) or rule))
        for rule in rules
    )
    return _Driver(name="cppmega", version=__version__, rules=tuple(described))


def _invocation(errors: list[Entry]) -> _Invocation:
    notifications = (_Notification(level="error", message=_message(error.text)) for error in errors)
    return _Invocation(
        execution_successful=not errors, tool_execution_notifications=tuple(notifications)
    )


def _result(entry: Entry, report: Report, rules: list[str], folder: Path) -> _Result:
    return _Result(
        rule_id=entry.rule,
        rule_index=rules.index(entry.rule),
        level=_LEVELS[entry.result],
        message=_message(entry.text),
        locations=tuple(_code(entry, folder)) or tuple(_page(entry, folder)),
        related_locations=tuple(_page(entry, folder)) if entry.place is not None else (),
        # Code scanning follows a result through commits by it; lines of upstream's code move.
        partial_fingerprints={"cppmega/v1": f"{report.command}:{entry.name}:{entry.rule}"},
        properties={"name": entry.name, "next": entry.next},
    )


def _code(entry: Entry, folder: Path) -> Iterator[_Location]:
    if entry.place is not None:
        yield _Location(physical_location=_physical(entry.place, folder))


def _page(entry: Entry, folder: Path) -> Iterator[_Location]:
    if entry.page is not None and entry.page.is_relative_to(folder):
        place = Place(folder, entry.page.relative_to(folder).as_posix())
        message = _message(f"the patch {entry.name}")
        yield _Location(id=0, physical_location=_physical(place, folder), message=message)


def _physical(place: Place, folder: Path) -> _PhysicalLocation:
    here = place.file.is_relative_to(folder)
    path = place.file.relative_to(folder).as_posix() if here else place.path
    return _PhysicalLocation(
        artifact_location=_ArtifactLocation(
            uri=quote(path), uri_base_id=_HERE if here else _MEGATRON
        ),
        region=_Region(start_line=place.line or 1),  # code scanning insists on a line
    )


def _message(text: str) -> _Message:
    """A message without lone surrogates, which an undecodable file name may contain."""
    return _Message(text=text.encode(errors="backslashreplace").decode())
