"""The thread of `cppmega.launch.agent` that notices SIGTERM and the end of the process in charge.

Python runs a signal's handler between two instructions of its main thread, and torchrun may wait in
C++ for as long as a rendezvous takes. The number of a signal arrives through a pipe at once.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable

from cppmega.host import process

_PERIOD = 0.5


class Watch(threading.Thread):
    """Pass SIGTERM on to the ranks; without a process in charge, make sure that they end.

    Args:
        parent: the process in charge.
        patience: seconds that ranks have to save and end once it is gone.
        end: called if there is no rank to pass anything on to; it ends this process.
    """

    def __init__(self, parent: int, patience: float, end: Callable[[], None]) -> None:
        super().__init__(daemon=True, name="watch")
        self.parent, self.patience, self.end = parent, patience, end
        self.ranks: set[int] = set()
        """Every rank so far: torchrun gives each its own session."""
        self.signalled: set[int] = set()
        self.asked = 0.0
        """When the ranks were asked to end; 0: they were not."""
        self.orphaned = False
        self.reader, writer = os.pipe()
        for end_of_pipe in (self.reader, writer):
            os.set_blocking(end_of_pipe, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)

    def run(self) -> None:
        while True:
            terminated = self._terminated()
            self.orphaned = self.orphaned or os.getppid() != self.parent
            if (terminated or self.orphaned) and not self.asked:
                self.asked = time.monotonic()
            living = set(process.children(os.getpid()))
            self.ranks |= {child for child in living if process.session(child) == child}
            if self.asked:
                self._pass_on(living)

    def _terminated(self) -> bool:
        select.select([self.reader], [], [], _PERIOD)
        try:
            return signal.SIGTERM in os.read(self.reader, 4096)
        except BlockingIOError:
            return False

    def _pass_on(self, living: set[int]) -> None:
        for rank in living - self.signalled:  # including one that starts only now
            process.send(rank, signal.SIGTERM)
        self.signalled |= living
        late = self.orphaned and time.monotonic() > self.asked + self.patience
        if late:
            for rank in living:
                process.send(rank, signal.SIGKILL)
        if not self.ranks or (late and not living):
            self.end()
