"""Compiled pages by the hash of their text, so that a process can pass them on to the next one.

Python's own bytecode on disk is found by the time and size of a source, which an edit can keep.
"""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import sys
from types import CodeType

_known: dict[str, bytes] = {}
_fresh: dict[str, CodeType] = {}
_HASH = 32
"""Bytes of a SHA-256."""


def code_of(path: str, text: bytes) -> CodeType:
    """The code of a source, compiled with docstrings and assertions even under `python -OO`."""
    key = hashlib.sha256(path.encode() + b"\0" + text).hexdigest()
    if key in _known:
        code: CodeType = marshal.loads(_known[key])
        return code
    if key not in _fresh:
        _fresh[key] = compile(text, path, "exec", dont_inherit=True, optimize=0)
    return _fresh[key]


def file_name() -> str:
    """The name of a file for it, which only this version of Python reads."""
    magic = importlib.util.MAGIC_NUMBER.hex()
    return f"pages.{sys.implementation.cache_tag}-{magic}.bin"


def adopt(data: bytes) -> None:
    """Adopt what `known` returned in another process; anything else is ignored."""
    rest = data[_HASH:]
    if hashlib.sha256(rest).digest() == data[:_HASH]:
        _known.update(marshal.loads(rest))


def known() -> bytes | None:
    """All compiled code, for a file; None if nothing was compiled here."""
    if not _fresh:
        return None
    rest = marshal.dumps(_known | {key: marshal.dumps(code) for key, code in _fresh.items()})
    return hashlib.sha256(rest).digest() + rest
