"""A result that calls on different GPUs of a host write together."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from cppmega.runs import json_file


def read(target: Path, key: str) -> dict[str, Any]:
    """The result so far; with nothing under the key, if there is none."""
    return json.loads(target.read_text()) if target.is_file() else {key: {}}


@contextlib.contextmanager
def changing(target: Path, key: str) -> Iterator[dict[str, Any]]:
    """What `read` returns, to be changed and written while no other call does the same."""
    with filelock.FileLock(target.with_suffix(".lock")):
        result = read(target, key)
        yield result
        json_file.write(target, result)
