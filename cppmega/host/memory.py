"""Memory of this host."""

from __future__ import annotations

from pathlib import Path

import psutil


def available() -> int:
    """Bytes that processes can still take without swapping, within the limits of our container."""
    free: int = psutil.virtual_memory().available
    return min(free, _left_in_cgroup())


def _left_in_cgroup() -> int:
    """Bytes below the limit of our cgroup; a very large number where it has none."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 2**62
    if limit == "max":
        return 2**62
    return int(limit) - used + int(cache.get("inactive_file", 0))
