"""The rules of SARIF 2.1.0 for the parts that cppmega writes, and those of code scanning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

_URI = re.compile(r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})+\Z")
Text = Annotated[str, msgspec.Meta(min_length=1)]
Level = Literal["none", "note", "warning", "error"]


class Part(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    pass


class Message(Part):
    text: Text


class ArtifactLocation(Part):
    uri: Text
    uri_base_id: str | None = None


class Region(Part):
    start_line: Annotated[int, msgspec.Meta(ge=1)]


class PhysicalLocation(Part):
    artifact_location: ArtifactLocation
    region: Region


class Location(Part):
    physical_location: PhysicalLocation
    id: Annotated[int, msgspec.Meta(ge=-1)] = -1
    message: Message | None = None


class Rule(Part):
    id: Text
    short_description: Message


class Result(Part):
    message: Message
    rule_id: Text
    rule_index: Annotated[int, msgspec.Meta(ge=0)]
    level: Level
    partial_fingerprints: dict[str, str]
    locations: list[Location] = []
    related_locations: list[Location] = []
    properties: dict[str, str] = {}


class Driver(Part):
    name: Text
    version: Text
    rules: list[Rule]


class Tool(Part):
    driver: Driver


class Notification(Part):
    message: Message
    level: Level


class Invocation(Part):
    execution_successful: bool
    tool_execution_notifications: list[Notification] = []


class Run(Part):
    tool: Tool
    invocations: list[Invocation]
    results: list[Result]
    column_kind: Literal["utf16CodeUnits", "unicodeCodePoints"]
    original_uri_base_ids: dict[str, ArtifactLocation] = {}


class Log(Part):
    version: Literal["2.1.0"]
    runs: Annotated[list[Run], msgspec.Meta(min_length=1)]
    schema: str = msgspec.field(name="$schema", default="")


def checked(text: str) -> Run:
    """The one run of a file that keeps every rule."""
    (run,) = msgspec.json.decode(text, type=Log).runs
    problems = list(broken(run))
    assert not problems, problems
    return run


def broken(run: Run) -> Iterator[str]:
    rules = [rule.id for rule in run.tool.driver.rules]
    if len(set(rules)) != len(rules):
        yield "a rule is declared twice"
    for name, base in run.original_uri_base_ids.items():
        parts = urlsplit(base.uri)
        if not (_URI.match(base.uri) and parts.scheme and base.uri.endswith("/")):
            yield f"{name}: {base.uri} is not the absolute URI of a folder"
    for result in run.results:
        if rules[result.rule_index : result.rule_index + 1] != [result.rule_id]:
            yield f"{result.rule_id} is not the rule of its index"
        ids = [place.id for place in result.related_locations]
        if len(set(ids)) != len(ids):
            yield "two related locations have one id"
        for place in (*result.locations, *result.related_locations):
            file = place.physical_location.artifact_location
            if not _URI.match(file.uri) or urlsplit(file.uri).scheme or file.uri[:1] == "/":
                yield f"{file.uri} is not a relative reference"
            if file.uri_base_id not in run.original_uri_base_ids:
                yield f"{file.uri_base_id} is not declared"
