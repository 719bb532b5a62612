"""The pages that a process has reached: flags of patched files, and of runtime patches."""

from __future__ import annotations

import sys

from cppmega.rewriting.marks import FLAGS

REACHED: set[str] = set()
"""The flags of the runtime patches; a patched file carries its own."""


def reached() -> set[str]:
    """Names of the pages that this process has reached so far, over all imported modules."""
    names = set(REACHED)
    for module in list(sys.modules.values()):
        flags = getattr(module, "__dict__", {}).get(FLAGS)
        if isinstance(flags, set):
            names |= flags
    return names
