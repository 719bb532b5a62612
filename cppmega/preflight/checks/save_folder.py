"""No other run writes checkpoints where this one will, or has left its own there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from cppmega.checkpoints import tracker as checkpoint_tracker
from cppmega.errors import CppmegaError
from cppmega.host import redact
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable

AFTER: tuple[str, ...] = ("recipe_complete",)

_PROC = Path("/proc")


def check(context: Context) -> str:
    """Look for ranks with the same --save among the processes of this host.

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
            f"{save} holds checkpoints already, and the run goes on from {load}.",
            "Steps of two runs would lie in one folder, and a restart would take whichever is "
            "newest.",
            "an empty --save folder, or leave --load out to go on from what is there",
        )
    own = set(_ancestors(os.getpid()))
    for process, words in _processes():
        if process in own or not any("cppmega.run" in word for word in words):
            continue
        for flag, value in pairwise(words):
            if flag == "--save" and Path(value).absolute() == save.absolute():
                raise CppmegaError(
                    "save-folder-in-use",
                    f"Process {process} of another run saves into {save}.",
                    "Two runs would overwrite each other's checkpoints.",
                    f"stop it (its command line: {' '.join(redact.words(words))[:120]}), "
                    "or another --save",
                )
    return f"nobody else saves into {save}"


def _places(context: Context) -> tuple[Path | None, Path | None]:
    """Where the run saves, and what it goes on from."""
    if context.is_loop:
        return context.options.save, context.options.load
    options = context.line.options
    return options.save, options.load


def _same(one: Path, other: Path) -> bool:
    return one.absolute() == other.absolute() or (one.exists() and one.samefile(other))


def _processes() -> Iterator[tuple[int, list[str]]]:
    for entry in _PROC.glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        yield int(entry.parent.name), words


def _ancestors(process: int) -> Iterator[int]:
    while process > 1:
        yield process
        try:
            fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return
        process = int(fields[1])
