"""What earlier applies found in the code of pages and of this package, in the user's cache folder.

A receipt says it for its own tree. A fresh tree, as after an upgrade of Megatron, has none, and to
parse some 250 files again, which are those of the last apply, takes an eighth of the time of an
apply. The entries are keyed by the bytes of a file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from cppmega.host import durable
from cppmega.rewriting import code_text
from cppmega.tree import wheels

_NAME = "known-code.json"
_MOST = 4096
"""Entries after which the file starts over."""


def adopt() -> None:
    """Adopt what earlier applies found, if the rules were the same."""
    code_text.remember(_read())


def keep() -> None:
    """Add what this process needed; without a cache folder, the next one parses again."""
    found, old = code_text.known(), _read()
    if old.get("rules") != found["rules"] or len(old) > _MOST:
        old = {}
    if found.keys() <= old.keys():
        return
    with contextlib.suppress(OSError, RuntimeError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        durable.replace(_file(), msgspec.json.encode(old | found))


def _read() -> dict[str, Any]:
    try:
        about = _file().stat()
        if about.st_uid != os.geteuid() or about.st_mode & 0o022:
            return {}  # what other users can write to proves nothing
        return msgspec.json.decode(_file().read_bytes(), type=dict[str, Any])
    except (OSError, RuntimeError, msgspec.DecodeError):
        return {}


def _file() -> Path:
    return wheels.cache() / _NAME
