"""No other run is writing checkpoints where this one will."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from cppmega.check import Context, NotApplicable
from cppmega.errors import CppmegaError

AFTER: tuple[str, ...] = ()

_PROC = Path("/proc")


def check(context: Context) -> str:
    """Look for ranks with the same --save among the processes of this host.

    Raises:
        CppmegaError: `save-folder-in-use`.
        NotApplicable: nothing is saved.
    """
    save = context.line.run.save
    if save is None:
        raise NotApplicable("nothing is saved")
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
                    f"stop it (its command line: {' '.join(words)[:120]}), or another --save",
                )
    return f"nobody else saves into {save}"


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
