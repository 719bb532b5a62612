"""Look at a run and end it: attach, logs, stop, and the table of all runs."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from cppmega.errors import CppmegaError
from cppmega.host import console, process
from cppmega.runs import failures, liveness, tmux
from cppmega.runs.folder import LIVE, MEANING, Node, Run

_PERIOD = 0.2
_CHUNK = 2**20
"""Bytes of a log that are held at once: some ranks print for weeks, and without a line's end."""


def attach(run: Run) -> NoReturn:
    """Become a client of the run's tmux session.

    Raises:
        CppmegaError: `run-ended`, `not-in-tmux`, `run-elsewhere`, `no-terminal`, `no-tmux`.
    """
    name, state = run.manifest.get("tmux"), run.state()
    if state not in LIVE:
        said = failures.first_failure(run)
        raise CppmegaError(
            "run-ended",
            f"{run.name} is {state}: {MEANING[state]}." + (f" {said}" if said else ""),
            "Its session has ended with it.",
            f"cppmega logs {run.word}",
        )
    node = _here(run, f"cppmega attach {run.word}")
    if not name:
        raise CppmegaError(
            "not-in-tmux",
            f"{run.name} was launched without --tmux.",
            "It runs in the terminal that launched it.",
            f"cppmega logs -f {run.word}",
        )
    tmux.require(f"cppmega logs -f {run.word}")
    if not tmux.exists(name):
        raise CppmegaError(
            "session-gone",
            f"The tmux session {name} is not there; process {node.status().get('pid')} goes on.",
            "The tmux server was ended, or belongs to another user.",
            f"cppmega logs -f {run.word}",
        )
    if not sys.stdin.isatty():
        raise CppmegaError(
            "no-terminal",
            "Standard input is no terminal.",
            "tmux needs one to draw on.",
            f"cppmega logs -f {run.word}",
        )
    tmux.attach(name)
    raise AssertionError("tmux has replaced this process")


def logs(run: Run, rank: int | None, follow: bool) -> None:
    """Print what a run printed, the first failure before everything else.

    Args:
        run: the run.
        rank: one rank's own output, stderr and stdout; None: what the terminal showed.
        follow: go on until the run ends.

    Raises:
        CppmegaError: `no-such-rank`, `no-logs`.
    """
    said = failures.first_failure(run)
    if said:
        print(said + "\n", flush=True)
    files = _files(run, rank)
    at = dict.fromkeys(files, 0)
    while True:
        ended = run.state() not in LIVE  # looked at first: what was written before is then read
        for file in files:
            at[file] = _print_from(file, at[file], named=len(files) > 1)
        if ended or not follow:
            break
        time.sleep(_PERIOD)
    if follow and not said and failures.first_failure(run):
        print("\n" + failures.first_failure(run), flush=True)


def _files(run: Run, rank: int | None) -> list[Path]:
    nodes = run.nodes()
    if rank is None:
        found = [node.console for node in nodes if node.console.exists()]
    else:
        if not {"nproc", "nodes"} <= set(run.manifest):
            run.require_whole()
        last = int(run.manifest["nproc"]) * int(run.manifest["nodes"]) - 1
        if not 0 <= rank <= last:
            raise CppmegaError(
                "no-such-rank",
                f"{run.name} has ranks 0 to {last}.",
                "There is no such log.",
                f"cppmega logs {run.word} --rank 0",
            )
        found = list(_of_rank(nodes, rank))
    if not found:
        raise CppmegaError(
            "no-logs",
            f"{run.name} ({run.state()}) has written nothing yet.",
            "Its processes are still starting, or never did.",
            f"cppmega runs, then cppmega logs {run.word}",
        )
    return found


def _of_rank(nodes: list[Node], rank: int) -> Iterator[Path]:
    """Both streams of a rank. torchrun names folders by the rank within a host."""
    for node in nodes:
        for folder in sorted(node.logs.glob("*/attempt_*/*")):
            if folder.name.isdigit() and _global_rank(node, int(folder.name)) == rank:
                yield from (folder / "stderr.log", folder / "stdout.log")


def _global_rank(node: Node, local: int) -> int:
    """torchrun gives a host's ranks in one block; which one is in its ranks' environment."""
    first = node.status().get("first_rank", 0)
    return int(first) + local


def _print_from(file: Path, at: int, named: bool) -> int:
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


def stop(run: Run, *, now: bool, wait: float) -> None:
    """Have the ranks save a checkpoint and end, and wait until they have.

    Args:
        run: the run.
        now: end at once, without a checkpoint.
        wait: seconds; the run goes on saving behind a caller that has waited long enough.

    Raises:
        CppmegaError: `run-ended`, `run-elsewhere`, `still-saving`, `not-saved`.
    """
    state = run.state()
    if state not in LIVE:
        raise CppmegaError(
            "run-ended",
            f"{run.name} is {state}: {MEANING[state]}.",
            "There is nothing to stop.",
            f"cppmega launch {run.manifest.get('recipe', {}).get('name', 'RECIPE')} "
            f"--resume {run.word}, to go on from its checkpoint",
        )
    node, before = _here(run, f"cppmega stop {run.word}"), run.checkpoint()
    _tell(node, now)
    console.say(
        f"{run.name}: ending at once"
        if now
        else f"{run.name}: the ranks save a checkpoint after their step, and end"
    )
    deadline = time.monotonic() + wait
    while run.state() in LIVE:
        if time.monotonic() > deadline:
            raise CppmegaError(
                "still-saving",
                f"{run.name} has not ended after {wait:.0f} s.",
                "A step or a large checkpoint takes longer, or a rank hangs.",
                f"cppmega logs -f {run.word}; to give up what is not saved: "
                f"cppmega stop --now {run.word}",
            )
        time.sleep(_PERIOD)
    after, state = run.checkpoint(), run.state()
    # An earlier stop may have seen to it: then what is saved is all that was trained.
    if now or after != before or (after is not None and after == run.last_row().get("step")):
        kept = f"checkpoint of step {after}" if after is not None else "no checkpoint"
        print(f"{state} {run.name}, {kept}")
        return
    raise CppmegaError(
        "not-saved",
        f"{run.name} has ended ({state}) without a new checkpoint"
        + (f"; the newest is of step {before}." if before is not None else "."),
        "It had not come to its first step, or saving failed.",
        f"cppmega logs {run.word}",
    )


def _tell(node: Node, now: bool) -> None:
    """Pass a stop on to the process in charge; where it was killed, to what it has left."""
    status = node.status()
    if liveness.in_charge(status):
        process.send(int(status["pid"]), signal.SIGQUIT if now else signal.SIGTERM)
        process.send(int(status["pid"]), signal.SIGCONT)  # after a Ctrl-Z in its terminal
        return
    left = liveness.left_behind(status)
    if now:  # torchrun's process writes down the end once its ranks are gone
        left = [pid for pid in left if pid != status.get("agent")] or left
    for pid in left:
        process.send(pid, signal.SIGKILL if now else signal.SIGTERM)


def _here(run: Run, command: str) -> Node:
    """A part of the run that lives on this machine."""
    for node in run.nodes():
        if node.here() and liveness.reachable(node.status()) and node.state() in LIVE:
            return node
    hosts = [_place(node.status()) for node in run.nodes() if node.status()]
    if not hosts:
        raise CppmegaError(
            "run-starting",
            f"{run.name} has no process in charge yet.",
            "There is nobody to ask.",
            f"wait a moment: {command}",
        )
    raise CppmegaError(
        "run-elsewhere",
        f"{run.name} runs on {', '.join(hosts)}; this is {socket.gethostname()}.",
        "Its processes can be reached there only.",
        f"on {hosts[0]}: {command}",
    )


def _place(status: Mapping[str, Any]) -> str:
    return f"{status['host']}{', in another container' if liveness.here(status) else ''}"


def row_of(run: Run) -> dict[str, Any]:
    """What the table says of a run."""
    last, statuses = run.last_row(), [node.status() for node in run.nodes()]
    ended = [status["ended"] for status in statuses if status.get("ended")]
    manifest = run.manifest
    return {
        "name": run.name,
        "state": run.state(),
        "exit": run.exit(),
        "recipe": manifest.get("recipe", {}).get("name", ""),
        "overlay": manifest.get("overlay", {}).get("digest", ""),
        "created": manifest.get("created"),
        "seconds": _seconds(manifest.get("created"), max(ended) if ended else time.time()),
        "step": last.get("step"),
        "loss": last.get("loss"),
        "checkpoint": run.checkpoint(),
        "tmux": manifest.get("tmux"),
        "hosts": [status.get("host") for status in statuses],
        "error": run.problem or failures.in_one_line(run) or _silence(run),
        "folder": str(run.path),
    }


def _silence(run: Run) -> str:
    """Of a run that is somewhere else: what speaks against its being alive."""
    for node in run.nodes():
        status, silent = node.status(), liveness.silence(node.status_file)
        if silent and status and node.state() in LIVE and not liveness.in_charge(status):
            return f"no sign of life from {_place(status)} for {_duration(silent)}"
    return ""


_STYLES: dict[str, console.Style] = {
    "crashed": "bad",
    "killed": "bad",
    "running": "good",
    "finished": "note",
}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each run, and under a crashed one what it died of."""
    width = max([4, *(len(row["name"]) for row in rows)])
    head = f"{'STATE':<9} {'NAME':<{width}} {'EXIT':>4} {'STEP':>7} {'LOSS':>8} {'SAVED':>7} "
    yield head + f"{'TIME':>8} {'OVERLAY':<16} TMUX"
    for row in rows:
        state = console.styled(f"{row['state']:<9}", _STYLES.get(row["state"]))
        loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
        yield (
            f"{state} {row['name']:<{width}} {_or_dash(row['exit']):>4} {_or_dash(row['step']):>7} "
            f"{loss:>8} {_or_dash(row['checkpoint']):>7} {_duration(row['seconds']):>8} "
            f"{row['overlay']:<16} {row['tmux'] or '-'}"
        )
        if row["error"]:
            yield f"{'':<9} {row['error']}"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _seconds(created: float | None, until: float) -> float | None:
    return None if created is None else max(0.0, until - created)  # clocks are set back, too


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
