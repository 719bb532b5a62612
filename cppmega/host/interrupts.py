"""An interrupt from the keyboard while a command is still being imported."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

_PENDING: list[int] = []


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Keep an interrupt for `raise_pending`; a second one ends the process at once."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, as in the background, or handled by whoever imports this
        return

    def keep(number: int, frame: FrameType | None) -> None:
        if _PENDING:
            os._exit(128 + number)
        _PENDING.append(number)

    try:
        signal.signal(signal.SIGINT, keep)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def raise_pending() -> None:
    """Raise the interrupt that arrived during imports.

    Raises:
        KeyboardInterrupt: one arrived.
    """
    if _PENDING:
        _PENDING.clear()
        raise KeyboardInterrupt
