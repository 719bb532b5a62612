"""Folders of a run that arguments of a script name before they exist."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cppmega.checkpoints import tracker as checkpoint_tracker

RUN, LOAD = "{run}", "{load}"


def filled(words: Iterable[str], run: Path, load: str | Path | None) -> tuple[str, ...]:
    """Put the folders in place of their placeholders.

    Args:
        words: arguments of a script.
        run: the run folder.
        load: the checkpoints of the run that it resumes, from which it begins as long as it has
            none of its own.
    """
    own = run / "checkpoints"
    begins = own if load is None or checkpoint_tracker.exists(own) else load
    return tuple(word.replace(RUN, str(run)).replace(LOAD, str(begins)) for word in words)
