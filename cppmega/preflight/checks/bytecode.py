"""No stale bytecode is used in place of a patched file.

Python trusts a `.pyc` that records the modification time (in seconds) and the size of its source.
The code in such a file is compared with what the source compiles to.
"""

from __future__ import annotations

import importlib.util
import marshal
from collections.abc import Iterator, Mapping
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import refuse

AFTER: tuple[str, ...] = ("one_root", "receipt_whole", "patched_files")

_HEADER = 16


def check(context: Context) -> str:
    """Compare the bytecode that this interpreter would use with every patched file.

    Raises:
        CppmegaError: `stale-bytecode`.
    """
    looked: list[Path] = []
    refuse(_stale(context, looked))
    return f"{len(looked)} bytecode files belong to their sources"


def _stale(context: Context, looked: list[Path]) -> Iterator[CppmegaError]:
    root = context.session.read_tree().root
    for path in context.receipt.files:
        source = root / path
        for cached, optimize in _caches(source, context.environ):
            looked.append(cached)
            if _trusted(cached, source) and not _same(cached, source, optimize):
                yield CppmegaError(
                    "stale-bytecode",
                    f"{cached} holds different code from {source}, and Python would run it.",
                    "The patch is in the source, but not in the code that runs.",
                    f"rm {cached}",
                )


def _caches(source: Path, environ: Mapping[str, str]) -> Iterator[tuple[Path, int]]:
    """The bytecode files of a source that exist, each with its level of optimization."""
    name = Path(importlib.util.cache_from_source(str(source))).name
    prefix = environ.get("PYTHONPYCACHEPREFIX")
    folder = source.parent / "__pycache__"
    if prefix:
        folder = Path(prefix) / source.parent.absolute().relative_to("/")
    for suffix, optimize in (("", 0), (".opt-1", 1), (".opt-2", 2)):
        cached = folder / name.replace(".pyc", f"{suffix}.pyc")
        if cached.is_file():
            yield cached, optimize


def _trusted(cached: Path, source: Path) -> bool:
    """Whether Python would use it without reading the source."""
    head = cached.read_bytes()[:_HEADER]
    if len(head) < _HEADER or head[:4] != importlib.util.MAGIC_NUMBER:
        return False
    flags = int.from_bytes(head[4:8], "little")
    if flags & 1:  # by hash, which is only compared where the second bit is set
        return not flags & 2 or head[8:] == importlib.util.source_hash(source.read_bytes())
    there = source.stat()
    return (int.from_bytes(head[8:12], "little"), int.from_bytes(head[12:16], "little")) == (
        int(there.st_mtime) & 0xFFFFFFFF,
        there.st_size & 0xFFFFFFFF,
    )


def _same(cached: Path, source: Path, optimize: int) -> bool:
    try:
        held = marshal.loads(cached.read_bytes()[_HEADER:])
    except (EOFError, ValueError, TypeError):
        return False
    fresh = compile(source.read_bytes(), str(source), "exec", dont_inherit=True, optimize=optimize)
    return bool(held == fresh)
