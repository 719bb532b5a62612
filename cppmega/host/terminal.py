"""What torchrun and its ranks print, copied from the console file to the terminal.

A thread does it: a reader that has stopped reading (`| less`, Ctrl-S) must not hold up the process
in charge of the run. Where the terminal is gone the run goes on without one.
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
"""Seconds that a reader gets to take the last lines."""


class Terminal(threading.Thread):
    """Follows a file until it is told that nothing more will come."""

    def __init__(self, console: Path) -> None:
        super().__init__(daemon=True, name="terminal")
        self.file = console.open("rb", buffering=0)  # readable after its folder is deleted
        self.over = threading.Event()
        self.gone = False
        """Standard output has no reader any more."""

    def run(self) -> None:
        while not self.gone:
            over = self.over.is_set()  # looked at first: what came before it is then read
            try:
                while new := self.file.read(_CHUNK):
                    self.put(new)
            except OSError:
                pass  # of a file system that went away
            if over:
                return
            self.over.wait(_PERIOD)

    def put(self, data: bytes) -> None:
        """Write everything, as long as there is a reader."""
        while data and not self.gone:
            try:
                data = data[os.write(_STDOUT, data) :]
            except BlockingIOError:  # some programs leave the terminal in that mode
                select.select([], [_STDOUT], [], _PERIOD)
            except OSError:
                self.gone = True

    def finish(self) -> None:
        """Copy the rest; a reader that does not read is left behind."""
        self.over.set()
        self.join(_LAST)
