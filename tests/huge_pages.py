"""Memory in huge pages, for a process that forks much.

A fork copies a table with an entry for every page, and its end takes it apart again: for the
processes of these tests that was most of what a short fork cost. Two megabytes in one page need one
entry, which a fork splits only where it writes.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

COLLAPSE = 25
"""`MADV_COLLAPSE`, which `mmap` does not have."""
HUGE = 2 * 2**20


def gather() -> None:
    """Move what this process has allocated so far into huge pages, where the kernel does that."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, _, *name = line.split(maxsplit=5)
        first, last = (int(address, 16) for address in addresses.split("-"))
        first, last = -(-first // HUGE) * HUGE, last // HUGE * HUGE
        if rights == "rw-p" and name in ([], ["[heap]"]) and first < last:
            advise(first, last - first, COLLAPSE)  # a kernel that declines leaves them as they are
