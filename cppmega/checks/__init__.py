"""Preflight checks, one per file, in the order in which they run."""

from __future__ import annotations

ORDER: tuple[str, ...] = ("one_root",)
"""Disk first, then the imported process, the stack, the hardware, and the launch line."""
