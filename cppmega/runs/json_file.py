"""The small JSON files of a run folder, any of which may be truncated, foreign or missing.

Disks fill up, copies are interrupted, and other releases write other schemas. One such folder must
not break the table of all runs, so a reader gets a typed record or none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cppmega.host import durable, json_text

T = TypeVar("T")


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file holds none."""
    try:
        raw = json_text.read(path)
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def read(path: Path, kind: type[T]) -> T | None:
    """Read a record; None if the file holds none of that kind."""
    return decode(read_object(path), kind)


def decode(raw: object, kind: type[T]) -> T | None:
    """Turn JSON values into a record; None if they do not describe one."""
    try:
        return convert(raw, kind)
    except msgspec.ValidationError:
        return None


def convert(raw: object, kind: type[T]) -> T:
    """Turn JSON values into a record.

    Raises:
        msgspec.ValidationError: a field is missing, or has another type or an impossible value.
    """
    return msgspec.convert(raw, kind, dec_hook=_from_text)


def plain(record: object) -> Any:
    """Turn a record into JSON values."""
    return msgspec.to_builtins(record, enc_hook=str)


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file atomically."""
    durable.replace(path, (json.dumps(content, indent=1) + "\n").encode())


def _from_text(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"{value!r} is not a {kind.__name__}")
