"""The thread of `cppmega.launch.agent` that hears SIGTERM and the end of the process in charge.

Python runs a signal's handler between two instructions of its main thread, and torchrun may wait in
C++ for as long as a rendezvous takes. The number of a signal comes through a pipe at once.
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
    """Passes SIGTERM on to the ranks; without a process in charge, sees to it that they end.

    Args:
        parent: the process in charge.
        patience: seconds that ranks get to save and end once it is gone.
        end: called where there is no rank to pass anything on to; it ends this process.
    """

    def __init__(self, parent: int, patience: float, end: Callable[[], None]) -> None:
        super().__init__(daemon=True, name="watch")
        self.parent, self.patience, self.end = parent, patience, end
        self.ranks: set[int] = set()
        """Every rank that was seen: torchrun gives each a session of its own."""
        self.told: set[int] = set()
        self.asked = 0.0
        """When the ranks were to end; 0: they were not."""
        self.orphaned = False
        self.heard, told = os.pipe()
        for end_of_pipe in (self.heard, told):
            os.set_blocking(end_of_pipe, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
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
        select.select([self.heard], [], [], _PERIOD)
        try:
            return signal.SIGTERM in os.read(self.heard, 4096)
        except BlockingIOError:
            return False

    def _pass_on(self, living: set[int]) -> None:
        for rank in living - self.told:  # one that starts only now, too
            process.send(rank, signal.SIGTERM)
        self.told |= living
        late = self.orphaned and time.monotonic() > self.asked + self.patience
        if late:
            for rank in living:
                process.send(rank, signal.SIGKILL)
        if not self.ranks or (late and not living):
            self.end()
