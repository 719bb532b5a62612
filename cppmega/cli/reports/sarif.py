"""SARIF 2.1.0, which code scanning and editors show next to the code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cppmega import __version__
from cppmega.cli.reports.entries import Entry, Place, Report, Result

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_LEVELS: Mapping[Result, str] = {"note": "note", "warning": "warning", "failed": "error"}
_HERE, _MEGATRON = "%SRCROOT%", "MEGATRON"
"""The bases of paths in the working directory, and in the tree that holds megatron/."""


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
    described = [
        {"id": rule, "shortDescription": _message(report.meanings.get(rule) or rule)}
        for rule in rules
    ]
    told = [{"level": "error", "message": _message(entry.text)} for entry in errors]
    run = {
        "tool": {"driver": {"name": "cppmega", "version": __version__, "rules": described}},
        "invocations": [{"executionSuccessful": not errors, "toolExecutionNotifications": told}],
        "originalUriBaseIds": {name: {"uri": base.as_uri() + "/"} for name, base in bases.items()},
        "columnKind": "unicodeCodePoints",
        "results": [_result(entry, report, rules, folder) for entry in shown],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _result(entry: Entry, report: Report, rules: list[str], folder: Path) -> dict[str, Any]:
    code = [_location(entry.place, folder)] if entry.place is not None else []
    page = []
    if entry.page is not None and entry.page.is_relative_to(folder):
        place = Place(folder, entry.page.relative_to(folder).as_posix())
        page = [_location(place, folder) | {"message": _message(f"the patch {entry.name}")}]
    return {
        "ruleId": entry.rule,
        "ruleIndex": rules.index(entry.rule),
        "level": _LEVELS[entry.result],
        "message": _message(entry.text),
        "locations": code or page,
        "relatedLocations": page if code else [],
        # Code scanning follows a result through commits by it; lines of upstream's code move.
        "partialFingerprints": {"cppmega/v1": f"{report.command}:{entry.name}:{entry.rule}"},
        "properties": {"name": entry.name, "next": entry.next},
    }


def _location(place: Place, folder: Path) -> dict[str, Any]:
    here = place.file.is_relative_to(folder)
    path = place.file.relative_to(folder).as_posix() if here else place.path
    file = {"uri": quote(path), "uriBaseId": _HERE if here else _MEGATRON}
    line = {"startLine": place.line or 1}  # code scanning insists on a line
    return {"id": 0, "physicalLocation": {"artifactLocation": file, "region": line}}


def _message(text: str) -> dict[str, str]:
    """A message without lone surrogates, which an undecodable file name may contain."""
    return {"text": text.encode(errors="backslashreplace").decode()}
