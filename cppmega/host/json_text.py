"""JSON from files that anyone may have written: whatever is in one, reading it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_NESTED = "its brackets are nested too deeply"


def loads(text: str | bytes) -> Any:
    """Decode a text.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(_NESTED) from None


def read(path: Path) -> Any:
    """Decode a file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not JSON, or not a file; reading a pipe would never end.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    return loads(path.read_bytes())


def decode(data: str | bytes, kind: type[T]) -> T:
    """Decode a record.

    Raises:
        msgspec.DecodeError: it is not a record of this kind.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise msgspec.DecodeError(_NESTED) from None
