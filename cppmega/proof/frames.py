"""Messages through a pipe, each preceded by its length.

A message arrives complete or not at all. The pipe does not show whether the writer has ended,
because a process that it left behind may hold the pipe open.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

_LENGTH = struct.Struct("!I")
_POLL = 0.2
"""Seconds between checks of whether the writer is alive."""

Message = TypeVar("Message", bound=msgspec.Struct)


def send(pipe: int, message: msgspec.Struct) -> None:
    """Write one message."""
    data = msgspec.json.encode(message)
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:
        left = left[os.write(pipe, left) :]


class Reader:
    """The messages that arrive through a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._data = b""

    def receive(
        self, kind: type[Message], seconds: float, ended: Callable[[], bool]
    ) -> Message | None:
        """Return the next message, or None if it is not complete in time or of another kind.

        Args:
            kind: the type of the message.
            seconds: how long to wait.
            ended: whether the writer has ended.
        """
        deadline = time.monotonic() + seconds
        while (message := self._next()) is None:
            gone, left = ended(), deadline - time.monotonic()
            ready, _, _ = select.select(
                [self._pipe], [], [], 0 if gone else max(0, min(left, _POLL))
            )
            data = os.read(self._pipe, 65536) if ready else b""
            self._data += data
            if not data and (ready or gone or left <= 0):
                return None
        try:
            return msgspec.json.decode(message, type=kind)
        except msgspec.MsgspecError:  # not from the worker: a proof may write to the pipe
            return None

    def _next(self) -> bytes | None:
        """Take the next complete message from what has arrived."""
        if len(self._data) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
        if len(self._data) < end:
            return None
        message = self._data[_LENGTH.size : end]
        self._data = self._data[end:]
        return message
