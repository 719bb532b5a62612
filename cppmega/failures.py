"""What a crashed run died of: the first rank that failed, and what it said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cppmega.run_folder import Node, Run

_TAIL = 12
"""Lines of a rank's stderr that stand for its error where it left none."""


def failure_of(node: Node) -> dict[str, Any]:
    """Rank, exit status or signal, and the message of the first failure; empty: none."""
    found = node.status().get("failure")
    return found if isinstance(found, dict) and node.state() == "crashed" else {}


def said_of(node: Node) -> str:
    """The first failure as a block of lines; empty where nothing failed."""
    failure = failure_of(node)
    if not failure:
        return ""
    if failure["rank"] is None:
        lines = tail(node.console)
        return "\n".join([f"{failure['message']}. Its last lines:", *_indented(lines)])
    how = f"signal {failure['signal']}" if failure.get("signal") else f"exit {failure['exit']}"
    head = f"rank {failure['rank']} on {node.status().get('host')} failed first ({how})"
    message = str(failure["message"]).strip()
    if not message and failure.get("signal"):
        hint = " (the kernel does so when memory runs out)" if failure["exit"] == -9 else ""
        return f"{head}: it was ended from outside{hint}."
    lines = message.splitlines() or tail(rank_log(node, failure["local_rank"], "stderr"))
    others = failure.get("others")
    if others:
        lines.append(f"(after it failed: rank {', '.join(map(str, others))})")
    return "\n".join([head + ":", *_indented(lines)])


def first_failure(run: Run) -> str:
    """Of all hosts of a run, the block of the one that failed first."""
    failed = [node for node in run.nodes() if failure_of(node)]
    failed.sort(key=lambda node: float(node.status().get("ended") or 0))
    return said_of(failed[0]) if failed else ""


def in_one_line(run: Run) -> str:
    """The same for a table: the rank and the gist of its error."""
    for node in run.nodes():
        failure = failure_of(node)
        if not failure:
            continue
        if failure["rank"] is None:
            return str(failure["message"])
        lines = [line for line in str(failure["message"]).splitlines() if line.strip()]
        gist = failure.get("signal") or f"exit {failure['exit']}"
        if lines and lines[0].startswith("error: "):
            what = next((x.strip() for x in lines if x.strip().startswith("what:")), "")
            gist = f"{lines[0].removeprefix('error: ')}: {what.removeprefix('what:').strip()}"
        elif lines:
            gist = lines[-1].strip()
        return f"rank {failure['rank']}: {gist}"
    return ""


def rank_log(node: Node, local_rank: int, stream: str) -> Path:
    """torchrun's file of one rank's output: the newest attempt's."""
    found = sorted(node.logs.glob(f"*/attempt_*/{local_rank}/{stream}.log"))
    return found[-1] if found else node.logs / f"rank-{local_rank}-has-not-started"


def tail(path: Path, lines: int = _TAIL) -> list[str]:
    """The last lines of a file; none where there is no file."""
    try:
        return path.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
