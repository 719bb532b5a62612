"""No stale bytecode is used in place of a patched file.

The code in a `.pyc` that Python would trust is compared with what the source compiles to.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import refuse
from cppmega.tree import pyc

AFTER: tuple[str, ...] = ("one_root", "receipt_whole", "patched_files")


def check(context: Context) -> str:
    """Compare the bytecode that this interpreter would use with every patched file.

    Raises:
        CppmegaError: `stale-bytecode`.
    """
    root = context.session.read_tree().root
    caches = [
        (cached, source)
        for source in (root / path for path in context.receipt.files)
        if (cached := Path(importlib.util.cache_from_source(str(source)))).is_file()
    ]
    refuse(_stale(caches))
    return f"{len(caches)} bytecode files belong to their sources"


def _stale(caches: list[tuple[Path, Path]]) -> Iterator[CppmegaError]:
    for cached, source in caches:
        held, text = cached.read_bytes(), source.read_bytes()
        if pyc.trusted(held, source, text) and not pyc.same(held, pyc.compiled(text, source)):
            yield CppmegaError(
                "stale-bytecode",
                f"{cached} holds different code from {source}, and Python would run it.",
                "The patch is in the source, but not in the code that runs.",
                f"rm {cached}",
            )
