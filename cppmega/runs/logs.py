"""Print the output of a run, and follow it while it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.runs import failures
from cppmega.runs.folder import LIVE, Node, Run

_PERIOD = 0.2
_CHUNK = 2**20
"""Bytes of a log held in memory at once: some ranks print for weeks, and without line breaks."""


def show(run: Run, rank: int | None, follow: bool) -> None:
    """Print the output of a run, the first failure before everything else.

    Args:
        run: the run.
        rank: one rank's own output, stderr and stdout; None: what the terminal showed.
        follow: continue until the run ends.

    Raises:
        CppmegaError: `no-such-rank`, `no-logs`, `run-damaged`.
    """
    failure = failures.first_failure(run)
    if failure:
        print(failure + "\n", flush=True)
    files = _files(run, rank)
    at = dict.fromkeys(files, 0)
    while True:
        ended = run.state() not in LIVE  # asked first, so that everything written before is read
        for file in files:
            at[file] = _print_from(file, at[file], named=len(files) > 1)
        if ended or not follow:
            break
        time.sleep(_PERIOD)
    if follow and not failure and failures.first_failure(run):
        print("\n" + failures.first_failure(run), flush=True)


def _files(run: Run, rank: int | None) -> list[Path]:
    nodes = run.nodes()
    if rank is None:
        files = [node.console for node in nodes if node.console.exists()]
    else:
        last = _ranks(run) - 1
        if not 0 <= rank <= last:
            raise CppmegaError(
                "no-such-rank",
                f"{run.name} has ranks 0 to {last}.",
                "No such log exists.",
                f"cppmega logs {run.word} --rank 0",
            )
        files = list(_of_rank(nodes, rank))
    if not files:
        raise CppmegaError(
            "no-logs",
            f"{run.name} ({run.state()}) has written nothing yet.",
            "Its processes are still starting, or never did.",
            f"cppmega runs, then cppmega logs {run.word}",
        )
    return files


def _ranks(run: Run) -> int:
    """How many ranks a run has, on all hosts."""
    outline = run.outline
    if outline.nproc is None or outline.nodes is None:
        outline = run.manifest  # raises
    assert outline.nproc is not None and outline.nodes is not None
    return outline.nproc * outline.nodes


def _of_rank(nodes: list[Node], rank: int) -> Iterator[Path]:
    """Both streams of a rank. torchrun names folders by the rank within a host."""
    for node in nodes:
        for folder in sorted(node.logs.glob("*/attempt_*/*")):
            if folder.name.isdigit() and _global_rank(node, int(folder.name)) == rank:
                yield from (folder / "stderr.log", folder / "stdout.log")


def _global_rank(node: Node, local: int) -> int:
    """torchrun gives a host a contiguous block of ranks; their environment shows which one."""
    status = node.status()
    return local + ((status and status.first_rank) or 0)


def _print_from(file: Path, at: int, named: bool) -> int:
    """Print a file from a position; returns where it ended."""
    try:
        opened = file.open("rb")
    except OSError:
        return at
    with opened:
        opened.seek(at)
        while new := opened.read(_CHUNK):
            if named and not at:
                print(f"== {file}", flush=True)
            sys.stdout.buffer.write(new)
            at += len(new)
    sys.stdout.buffer.flush()
    return at
