"""Messages through a pipe, each with its length in front: whole, or not there by a deadline.

The end of a pipe tells nothing where a forgotten grandchild holds it open.
"""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("!I")
_LOOK = 0.2
"""Seconds between two looks at whether the writer lives."""


def send(pipe: int, message: dict[str, Any]) -> None:
    """Write one message."""
    data = json.dumps(message).encode()
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:
        left = left[os.write(pipe, left) :]


class Reader:
    """The messages that arrive through a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._data = b""

    def receive(self, seconds: float, ended: Callable[[], bool]) -> dict[str, Any] | None:
        """The next message; None where the writer ends, or the time, before it is whole.

        Args:
            ended: whether the writer has ended.
        """
        deadline = time.monotonic() + seconds
        while (message := self._taken()) is None:
            gone, left = ended(), deadline - time.monotonic()
            ready, _, _ = select.select(
                [self._pipe], [], [], 0 if gone else max(0, min(left, _LOOK))
            )
            data = os.read(self._pipe, 65536) if ready else b""
            self._data += data
            if not data and (ready or gone or left <= 0):
                return None
        return message

    def _taken(self) -> dict[str, Any] | None:
        if len(self._data) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
        if len(self._data) < end:
            return None
        message: dict[str, Any] = json.loads(self._data[_LENGTH.size : end])
        self._data = self._data[end:]
        return message
