"""Memory of this host."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def available() -> int:
    """Bytes that processes can still take without swapping, as the kernel estimates them."""
    for line in _MEMINFO.read_text().splitlines():
        name, value, *_ = line.split()
        if name == "MemAvailable:":
            return int(value) * 1024
    raise AssertionError(f"{_MEMINFO} has no MemAvailable")
