"""Scenes that change something in a guarded process, and what the guard says of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from cppmega import guard
from cppmega.errors import CppmegaError
from cppmega.guard import allowed

Scene = Callable[[], Iterator[None]]
"""Changes something, yields, puts it back."""


def play_all(scenes: Mapping[str, Scene]) -> None:
    """Print, for each scene, what the guard says during it and afterwards."""
    found = {"before": (_look(), "")}
    for name, play in scenes.items():
        running = play()
        next(running)
        during = _look()
        next(running, None)
        found[name] = (during, _look())
    found["met"] = (json.dumps(allowed.met()), "")
    print("FOUND", json.dumps(found))


def _look() -> str:
    try:
        guard.recheck("in a scene")
    except CppmegaError as error:
        return f"{error.what} NEXT {error.next}"
    return ""
