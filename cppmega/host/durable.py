"""Small JSON files that can be written even on a full disk.

A file is replaced atomically, so that a reader sees the old text or the new one. If the disk has no
room for a second file, it is overwritten in place: it was padded when it was created, and keeps the
blocks that it has. The end of a run is often written when the disk is full.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOM = 2**14
"""The minimum size of a file in bytes; blanks after a JSON object have no meaning."""
_LONG = 1000
"""Characters of a text that are kept if not everything fits."""


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file; on a full disk, overwrite it.

    Raises:
        OSError: it can be neither replaced nor overwritten.
    """
    try:
        replace(path, _text(content))
    except OSError as error:
        try:
            _overwrite(path, content)
        except OSError:
            raise error from None


def reserve(path: Path) -> None:
    """Create a file of blanks, which reserves its space."""
    replace(path, b" " * _ROOM)


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically; leaves no temporary file behind."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _overwrite(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("r+b", buffering=0) as file:
        room = os.fstat(file.fileno()).st_size
        data = _text(content)
        if len(data) > room:
            data = _text({name: _cut(value) for name, value in content.items()})
        # One call, so that a reader sees all of it.
        os.pwrite(file.fileno(), data.ljust(room), 0)


def _text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode().ljust(_ROOM)


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONG:
        return value[: _LONG // 2] + " ... " + value[-_LONG // 2 :]
    return {k: _cut(v) for k, v in value.items()} if isinstance(value, dict) else value
