"""What a crashed run died of: the first rank that failed, and what it said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cppmega.host import process
from cppmega.runs import liveness
from cppmega.runs import manifest as run_manifest
from cppmega.runs.folder import Node, Run

_TAIL = 12
"""Lines of a rank's stderr that stand for its error where it left none."""
_LAST = 2**16
"""Bytes at the end of a file that hold them."""


def failure_of(node: Node) -> dict[str, Any]:
    """Rank, exit status or signal, and the message of the first failure; empty: none."""
    return run_manifest.failure(node.status()) if node.state() in ("crashed", "killed") else {}


def said_of(node: Node) -> str:
    """The first failure as a block of lines; empty where nothing failed."""
    failure = failure_of(node)
    if not failure:
        return ""
    note = [f"({node.status()['note']})"] if node.status().get("note") else []
    if failure.get("rank") is None:
        lines = tail(node.console)
        return "\n".join([f"{failure['message']}. Its last lines:", *_indented(lines), *note])
    how = _signal(failure) or f"exit {failure['exit']}"
    head = f"rank {failure['rank']} on {node.status().get('host')} failed first ({how})"
    message = str(failure["message"]).strip()
    if not message and failure.get("signal"):
        hint = " (the kernel does so when memory runs out)" if failure["exit"] == -9 else ""
        return "\n".join([f"{head}: it was ended from outside{hint}.", *note])
    lines = message.splitlines() or tail(rank_log(node, failure["local_rank"], "stderr"))
    others = failure.get("others")
    if others:
        lines.append(f"(after it failed: rank {', '.join(map(str, others))})")
    return "\n".join([head + ":", *_indented([*lines, *note])])


def first_failure(run: Run) -> str:
    """Of all hosts of a run, the block of the one that failed first."""
    failed = [node for node in run.nodes() if failure_of(node)]
    failed.sort(key=lambda node: float(node.status().get("ended") or 0))
    return said_of(failed[0]) if failed else ""


def in_one_line(run: Run) -> str:
    """The same for a table: the rank and the gist of its error, or who was killed."""
    for node in run.nodes():
        failure = failure_of(node)
        said = _gist(failure) if failure else _killed(node)
        if said:
            note = node.status().get("note")
            return _printable(f"{said} ({note})" if note else said)
    return ""


def _gist(failure: dict[str, Any]) -> str:
    if failure.get("rank") is None:
        return str(failure.get("message", ""))
    lines = [line for line in str(failure["message"]).splitlines() if line.strip()]
    gist = _signal(failure) or f"exit {failure['exit']}"
    if lines and lines[0].startswith("error: "):
        what = next((x.strip() for x in lines if x.strip().startswith("what:")), "")
        gist = f"{lines[0].removeprefix('error: ')}: {what.removeprefix('what:').strip()}"
    elif lines:
        gist = lines[-1].strip()
    return f"rank {failure['rank']}: {gist}"


def _signal(failure: dict[str, Any]) -> str:
    name, code = failure.get("signal"), failure["exit"]
    return f"killed by signal {-code} ({name})" if name and code else ""


def _killed(node: Node) -> str:
    """How a run without an exit status ended, as far as it can be told from what is left."""
    if node.state() != "killed":
        return ""
    status = node.status()
    if not status and node.status_file.exists():
        return f"{node.status_file.name} cannot be read: how it ended is not known"
    if not status:
        return "the launch ended before its run began"
    if status.get("boot") != process.boot():
        return "the machine was restarted while it ran"
    if not liveness.reachable(status):
        return "its container ended while it ran"
    return "the launcher was killed, and torchrun with it: it ended without an end record"


def _printable(text: str) -> str:
    """Without control characters: what a rank printed must not steer a terminal."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def rank_log(node: Node, local_rank: int, stream: str) -> Path:
    """torchrun's file of one rank's output: the newest attempt's."""
    found = sorted(node.logs.glob(f"*/attempt_*/{local_rank}/{stream}.log"))
    return found[-1] if found else node.logs / f"rank-{local_rank}-has-not-started"


def tail(path: Path, lines: int = _TAIL) -> list[str]:
    """The last lines of a file; none where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LAST))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
