"""The progress of each rank of this host, to diagnose a run that has stopped making progress.

A rank keeps its counts in an anonymous file in memory, which the watcher reads through /proc. A
write costs no system call, nothing is left behind when the rank ends, and a file system that hangs
cannot stop a rank.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from functools import cache
from pathlib import Path

import msgspec
import psutil

from cppmega.host import env, process
from cppmega.runs import liveness
from cppmega.runs.folder import Run

_NAME = "cppmega-rank-progress"
_COUNTS = struct.Struct("=qq")
_STUCK = {psutil.STATUS_STOPPED: "stopped", psutil.STATUS_TRACING_STOP: "held by a debugger"}
"""States in which a process is stopped until another one wakes it."""


class Marks:
    """The counts of this rank, which it updates while it trains."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memory
        self._steps = self._batches = 0

    def begin_step(self) -> None:
        """Count a step, before its first micro-batch is read."""
        self._steps, self._batches = self._steps + 1, 0
        _COUNTS.pack_into(self._memory, 0, self._steps, self._batches)

    def read_batch(self) -> None:
        """Count a micro-batch that was read."""
        self._batches += 1
        _COUNTS.pack_into(self._memory, 0, self._steps, self._batches)


@cache
def of_this_rank() -> Marks:
    """The counts of this process; only those of a launched run can be read by others."""
    if env.RUN.read() is None:
        return Marks(bytearray(_COUNTS.size))
    try:
        return Marks(_shared())
    except OSError:  # training takes precedence
        return Marks(bytearray(_COUNTS.size))


def _shared() -> mmap.mmap:
    handle = os.memfd_create(_NAME)
    try:
        os.ftruncate(handle, _COUNTS.size)
        return mmap.mmap(handle, _COUNTS.size)  # which keeps a duplicate of the handle open
    finally:
        os.close(handle)


class RankProgress(msgspec.Struct, frozen=True, order=True):
    """The counts of one rank since it started."""

    steps: int
    """Steps that it has started."""
    batches: int
    """Micro-batches that it has read in the last of them."""

    def __str__(self) -> str:
        return f"step {self.steps}, micro-batch {self.batches}"


def read(pid: int) -> RankProgress | None:
    """Read the counts of a process; None if it keeps none or is another user's."""
    with contextlib.suppress(OSError):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            if handle.readlink().name.startswith(f"memfd:{_NAME}"):
                return RankProgress(*_COUNTS.unpack(handle.read_bytes()))
    return None


def behind(run: Run, slack: int = 0) -> str:
    """Name the rank of this host that the others wait for; empty if that is not known.

    Args:
        slack: micro-batches by which a rank may be behind: those that a pipeline holds.
    """
    ranks = _ranks(run)
    stuck = [(rank, pid, _stuck(pid)) for rank, pid in sorted(ranks.items())]
    stopped = [f"rank {rank} (process {pid}) is {why}" for rank, pid, why in stuck if why]
    if stopped:
        return "; ".join(stopped)
    counts = {rank: read(pid) for rank, pid in ranks.items()}
    return slowest({rank: count for rank, count in counts.items() if count is not None}, slack)


def slowest(counts: dict[int, RankProgress], slack: int) -> str:
    """Name the ranks that are behind the others; empty if all are equally far."""
    if not counts:
        return ""
    first = max(counts.values())
    late = {
        rank: count
        for rank, count in sorted(counts.items())
        if count.steps < first.steps or count.batches < first.batches - slack
    }
    named = (f"rank {rank} is behind (in its {count})" for rank, count in late.items())
    return f"{'; '.join(named)}; the first is in its {first}" if late else ""


def _ranks(run: Run) -> dict[int, int]:
    """Rank -> process, of the living ranks on this host."""
    statuses = [node.status() for node in run.nodes()]
    here = [status for status in statuses if status is not None and liveness.here(status)]
    pids = [
        int(pid)
        for status in here
        if liveness.reachable(status)
        for pid, since in status.workers.items()
        if pid.isdigit() and process.alive(int(pid), since)
    ]
    ranks = {pid: process.environment(pid).get("RANK", "") for pid in pids}
    return {int(rank): pid for pid, rank in ranks.items() if rank.isdigit()}


def _stuck(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return _STUCK.get(psutil.Process(pid).status(), "")
    return ""
