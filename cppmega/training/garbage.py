"""Keep Python's garbage collector from stopping a rank for half a second while the others wait.

A full collection examines every object of the process: 0.4 to 0.7 s in a run of the whole NAM56R,
once in some twenty steps, on each rank at a time of its own. Nearly all of these objects live until
the end of the run. Once the first steps have compiled and cached what they need, the objects that
exist are collected a last time and then left out of all later collections, which still find what
becomes garbage from then on.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

STEPS = 2
"""Steps of a start after which the objects of the process count as permanent."""


@dataclass(slots=True)
class Garbage:
    """The collections of one start on this rank."""

    _steps: int = 0

    def after_step(self) -> None:
        """Collect once, after the first steps, and make everything that is left permanent."""
        self._steps += 1
        if self._steps == STEPS:
            gc.collect()
            gc.freeze()
