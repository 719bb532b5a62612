"""Progress of work on many bytes: a bar on stderr, or lines among other output."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

_EVERY = 10.0
"""Seconds between two lines."""

Advance = Callable[[int], None]


@contextmanager
def of_bytes(what: str, total: int) -> Iterator[Advance]:
    """Show a bar while the block runs; call the value it yields with each number of bytes done."""
    with click.progressbar(length=total, label=what, file=sys.stderr) as shown:
        yield shown.update


def lines(what: str, total: int, say: Callable[[str], None]) -> Advance:
    """Return a function that is called with each number of bytes done, and reports every 10 s."""
    start = last = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        if (now := time.monotonic()) - last > _EVERY:
            last, speed = now, done / (now - start) / 1e9
            say(f"{what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {speed:.2f} GB/s")

    return advance
