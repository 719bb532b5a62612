"""Facts about the code of pages and of this package, cached across applies for the user.

A receipt has the facts for its own tree. A fresh tree, as after an upgrade of Megatron, has none,
and parsing and compiling the same 250 or so files again takes a sixth of the time of an apply. All
entries are keyed by the bytes of a file.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from cppmega.host import compiled, durable, own_files
from cppmega.rewriting import code_text
from cppmega.tree import wheels

_FACTS = "known-code.json"
_MOST = 4096
"""Maximum number of entries, and kilobytes of compiled pages, before a file is started over."""


def adopt() -> None:
    """Adopt compiled pages and facts; those found by other rules are ignored."""
    if data := _read(compiled.file_name()):
        compiled.adopt(data)
    code_text.remember(_facts())


def keep() -> None:
    """Save what this process computed; without a cache folder, the next one computes it again."""
    pages = compiled.known()
    if pages is not None:
        _write(compiled.file_name(), pages if len(pages) <= _MOST << 10 else b"")
    found, old = code_text.known(), _facts()
    if old.get("rules") != found["rules"] or len(old) > _MOST:
        old = {}
    if not found.keys() <= old.keys():
        _write(_FACTS, msgspec.json.encode(old | found))


def _folder() -> Path:
    return wheels.cache()


def _facts() -> dict[str, Any]:
    try:
        return msgspec.json.decode(_read(_FACTS), type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def _read(name: str) -> bytes:
    with contextlib.suppress(RuntimeError):  # no home folder
        return own_files.read(_folder() / name)
    return b""


def _write(name: str, data: bytes) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        file = _folder() / name
        file.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(file, data)
