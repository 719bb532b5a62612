"""The flags of the runtime patches; a module of its own so that reading them imports nothing."""

from __future__ import annotations

REACHED: set[str] = set()
