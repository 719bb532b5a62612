"""Copy what torchrun and its ranks print from the console file to the terminal.

A thread does this: a reader that has stopped reading (`| less`, Ctrl-S) must not block the process
in charge of the run. If the terminal is gone, the run continues without one.
"""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path

_PERIOD = 0.2
_CHUNK = 2**16
_STDOUT = 1
_LAST = 5.0
"""Seconds that a reader is given for the last lines."""


class Terminal(threading.Thread):
    """Follows a file until `finish` is called."""

    def __init__(self, console: Path) -> None:
        super().__init__(daemon=True, name="terminal")
        self.file = console.open("rb", buffering=0)  # readable after its folder is deleted
        self.over = threading.Event()
        self.gone = False
        """Whether standard output has lost its reader."""

    def run(self) -> None:
        while not self.gone:
            over = self.over.is_set()  # read first, so that everything before it is copied
            try:
                while new := self.file.read(_CHUNK):
                    self.put(new)
            except OSError:
                pass  # the file system is gone
            if over:
                return
            self.over.wait(_PERIOD)

    def put(self, data: bytes) -> None:
        """Write everything, as long as there is a reader."""
        while data and not self.gone:
            try:
                data = data[os.write(_STDOUT, data) :]
            except BlockingIOError:  # some programs leave the terminal non-blocking
                select.select([], [_STDOUT], [], _PERIOD)
            except OSError:
                self.gone = True

    def finish(self) -> None:
        """Copy the rest, without waiting long for a reader that has stopped reading."""
        self.over.set()
        self.join(_LAST)
