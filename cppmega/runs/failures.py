"""Why a run crashed: the first rank that failed, and its message."""

from __future__ import annotations

from pathlib import Path

from cppmega.host import process
from cppmega.runs import liveness
from cppmega.runs.folder import Node, Run
from cppmega.runs.status import Failure

_TAIL = 12
"""Lines of a rank's stderr that are shown if it left no error."""
_LAST = 2**16
"""Bytes at the end of a file in which they are searched."""


def failure_of(node: Node) -> Failure | None:
    """The first failure on a host; None if nothing failed."""
    status = node.status()
    if status is None or node.state() not in ("crashed", "killed"):
        return None
    return status.failure or None


def described(node: Node) -> str:
    """The first failure on a host as a block of lines; empty if nothing failed."""
    status, failure = node.status(), failure_of(node)
    if status is None or failure is None:
        return ""
    note = [f"({status.note})"] if status.note else []
    if failure.rank is None:
        lines = tail(node.console)
        return "\n".join([f"{failure.message}. Its last lines:", *_indented(lines), *note])
    message = failure.message.strip()
    how = _signal(failure) or f"exit {failure.exit}"
    if message and failure.signal:  # torchrun ends the ranks that have not exited yet
        how += " after its error"
    head = f"rank {failure.rank} on {status.host} failed first ({how})"
    if not message and failure.signal:
        hint = " (the kernel does so when memory runs out)" if failure.exit == -9 else ""
        return "\n".join([f"{head}: it was ended from outside{hint}.", *note])
    lines = message.splitlines() or tail(rank_log(node, failure.local_rank or 0, "stderr"))
    if failure.others:
        lines.append(f"(after it failed: rank {', '.join(map(str, failure.others))})")
    return "\n".join([head + ":", *_indented([*lines, *note])])


def first_failure(run: Run) -> str:
    """The block of lines of the host that failed first; empty if nothing failed."""
    failed = [(node.status(), node) for node in run.nodes() if failure_of(node)]
    failed.sort(key=lambda pair: (pair[0] and pair[0].ended) or 0.0)
    return described(failed[0][1]) if failed else ""


def in_one_line(run: Run) -> str:
    """The same for a table: the rank and the gist of its error, or which process was killed."""
    for node in run.nodes():
        status, failure = node.status(), failure_of(node)
        gist = _gist(failure) if failure else _killed(node)
        if gist:
            note = status.note if status is not None else ""
            return _printable(f"{gist} ({note})" if note else gist)
    return ""


def _gist(failure: Failure) -> str:
    if failure.rank is None:
        return failure.message
    lines = [line for line in failure.message.splitlines() if line.strip()]
    gist = _signal(failure) or f"exit {failure.exit}"
    if lines and lines[0].startswith("error: "):
        what = next((x.strip() for x in lines if x.strip().startswith("what:")), "")
        gist = f"{lines[0].removeprefix('error: ')}: {what.removeprefix('what:').strip()}"
    elif lines:
        gist = lines[-1].strip()
    return f"rank {failure.rank}: {gist}"


def _signal(failure: Failure) -> str:
    if not (failure.signal and failure.exit):
        return ""
    return f"killed by signal {-failure.exit} ({failure.signal})"


def _killed(node: Node) -> str:
    """How a run without an exit status ended, as far as its folder shows."""
    if node.state() != "killed":
        return ""
    status = node.status()
    if status is None and node.status_file.exists():
        return f"{node.status_file.name} cannot be read: how it ended is not known"
    if status is None:
        return "the launch ended before its run began"
    if status.boot != process.boot():
        return "the machine was restarted while it ran"
    if not liveness.reachable(status):
        return "its container ended while it ran"
    return "the launcher was killed, and torchrun with it: it ended without an end record"


def _printable(text: str) -> str:
    """Blank out control characters: what a rank printed must not steer a terminal."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def rank_log(node: Node, local_rank: int, stream: str) -> Path:
    """The file with one rank's output, of the newest attempt."""
    attempts = sorted(node.logs.glob(f"*/attempt_*/{local_rank}/{stream}.log"))
    return attempts[-1] if attempts else node.logs / f"rank-{local_rank}-has-not-started"


def tail(path: Path, lines: int = _TAIL) -> list[str]:
    """The last lines of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LAST))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
