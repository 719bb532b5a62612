"""No other run writes, or has left, checkpoints where this one will save."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil

from cppmega.checkpoints import tracker as checkpoint_tracker
from cppmega.errors import CppmegaError
from cppmega.host import redact
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable

AFTER: tuple[str, ...] = ("recipe_complete",)


def check(context: Context) -> str:
    """Search the processes of this host for ranks with the same --save.

    Raises:
        CppmegaError: `save-folder-in-use`, `save-folder-of-another-run`.
        NotApplicable: nothing is saved.
    """
    save, load = _places(context)
    if save is None:
        raise NotApplicable("nothing is saved")
    if checkpoint_tracker.exists(save) and load is not None and not _same(load, save):
        raise CppmegaError(
            "save-folder-of-another-run",
            f"{save} already holds checkpoints, and the run resumes from {load}.",
            "Steps of two runs would share one folder, and a restart would resume from the "
            "newest of either.",
            f"an empty --save folder, or leave out --load to resume from {save}",
        )
    for pid, words in _other_ranks():
        for flag, value in pairwise(words):
            if flag == "--save" and Path(value).absolute() == save.absolute():
                raise CppmegaError(
                    "save-folder-in-use",
                    f"Process {pid} of another run saves into {save}.",
                    "Two runs would overwrite each other's checkpoints.",
                    f"stop it (its command line: {' '.join(redact.words(words))[:120]}), "
                    "or another --save",
                )
    return f"no other run saves into {save}"


def _places(context: Context) -> tuple[Path | None, Path | None]:
    """Where the run saves, and what it resumes from."""
    if context.is_loop:
        return context.options.save, context.options.load
    options = context.launch_line.options
    return options.save, options.load


def _same(one: Path, other: Path) -> bool:
    return one.absolute() == other.absolute() or (one.exists() and one.samefile(other))


def _other_ranks() -> Iterator[tuple[int, list[str]]]:
    """Processes that run `cppmega.run`, with their words, other than this one's ancestors."""
    this = psutil.Process()
    own = {this.pid, *(parent.pid for parent in this.parents())}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []  # None where it is another user's
        if process.pid not in own and any("cppmega.run" in word for word in words):
            yield process.pid, words
