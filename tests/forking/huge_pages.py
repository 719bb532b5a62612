"""Imported by a fork server last: huge pages for a process that forks often.

A fork copies the page table, which has an entry for every page, and frees it when it exits; in the
forks of one with torch, that is most of the cost of a short fork. A huge page of 2 MiB needs one
entry, which is split only where the fork writes.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

COLLAPSE = 25
"""`MADV_COLLAPSE`, which `mmap` does not have."""
HUGE = 2 * 2**20


def gather() -> None:
    """Move the memory allocated so far into huge pages, if the kernel supports it."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, _, *name = line.split(maxsplit=5)
        first, last = (int(address, 16) for address in addresses.split("-"))
        first, last = -(-first // HUGE) * HUGE, last // HUGE * HUGE
        if rights == "rw-p" and name in ([], ["[heap]"]) and first < last:
            advise(first, last - first, COLLAPSE)  # a kernel that declines leaves them as they are


gather()
