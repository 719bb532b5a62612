"""Attach to a run and stop it."""

from __future__ import annotations

import signal
import socket
import sys
import time
from typing import NoReturn

from cppmega.errors import CppmegaError
from cppmega.host import console, process
from cppmega.runs import failures, listing, liveness, tmux
from cppmega.runs.folder import LIVE, MEANING, Node, Run

_PERIOD = 0.2


def attach(run: Run) -> NoReturn:
    """Become a client of the run's tmux session.

    Raises:
        CppmegaError: `run-ended`, `not-in-tmux`, `run-elsewhere`, `no-terminal`, `no-tmux`.
    """
    name = run.outline.tmux
    if run.state() not in LIVE:
        failure = failures.first_failure(run)
        why = f"Its session has ended with it. {failure}".strip()
        raise _ended(run, why, f"cppmega logs {run.word}")
    node = _here(run, f"cppmega attach {run.word}")
    follow = f"cppmega logs -f {run.word}"
    if not name:
        raise CppmegaError(
            "not-in-tmux",
            f"{run.name} was launched without --tmux.",
            "It runs in the terminal that launched it.",
            follow,
        )
    tmux.require(follow)
    if not tmux.exists(name):
        status = node.status()
        pid = status.pid if status is not None else "in charge"
        raise CppmegaError(
            "session-not-started",
            f"The tmux session {name} does not exist; process {pid} continues.",
            "The tmux server was ended, or belongs to another user.",
            follow,
        )
    if not sys.stdin.isatty():
        raise CppmegaError(
            "no-terminal",
            "Standard input is not a terminal.",
            "tmux needs one to draw on.",
            follow,
        )
    tmux.attach(name)
    raise AssertionError("tmux has replaced this process")


def stop(run: Run, *, now: bool, wait: float) -> None:
    """Ask the ranks to save a checkpoint and end, and wait until they have ended.

    Args:
        run: the run.
        now: end at once, without a checkpoint.
        wait: seconds; the run continues to save after a caller that has waited long enough.

    Raises:
        CppmegaError: `run-ended`, `run-elsewhere`, `still-saving`, `not-saved`.
    """
    if run.state() not in LIVE:
        raise _ended(run, "There is nothing to stop.")
    node, before = _here(run, f"cppmega stop {run.word}"), run.checkpoint()
    _request(node, now)
    console.say(
        f"{run.name}: ending immediately"
        if now
        else f"{run.name}: the ranks are asked, by SIGTERM, to save a checkpoint and to end"
    )
    _await_end(run, wait)
    after, state = run.checkpoint(), run.state()
    # An earlier stop may have saved it: then the checkpoint holds all that was trained.
    last = run.last_step()
    complete = after is not None and last is not None and after == last.step
    if now or after != before or complete:
        kept = f"checkpoint of step {after}" if after is not None else "no checkpoint"
        print(f"{state} {run.name}, {kept}")
        return
    raise CppmegaError(
        "not-saved",
        f"{run.name} has ended ({state}) without a new checkpoint"
        + (f"; the newest is of step {before}." if before is not None else "."),
        "It had not reached its first step, saving failed, or a script of your own does not save "
        "on SIGTERM.",
        f"cppmega logs {run.word}",
    )


def _ended(run: Run, why: str, command: str = "") -> CppmegaError:
    state = run.state()
    return CppmegaError(
        "run-ended",
        f"{run.name} is {state}: {MEANING[state]}.",
        why,
        command or f"cppmega launch --resume {run.word}, to resume from its checkpoint",
    )


def _await_end(run: Run, wait: float) -> None:
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


def _request(node: Node, now: bool) -> None:
    """Ask the process in charge to stop, or those it left behind if it was killed."""
    status = node.status()
    if status is None:
        return
    if liveness.in_charge(status):
        process.send(status.pid, signal.SIGQUIT if now else signal.SIGTERM)
        process.send(status.pid, signal.SIGCONT)  # after a Ctrl-Z in its terminal
        return
    left = liveness.left_behind(status)
    if now:  # torchrun's process records the end once its ranks are gone
        left = [pid for pid in left if pid != status.agent] or left
    for pid in left:
        process.send(pid, signal.SIGKILL if now else signal.SIGTERM)


def _here(run: Run, command: str) -> Node:
    """The part of the run that is alive on this machine."""
    for node in run.nodes():
        status = node.status()
        reached = status is not None and liveness.here(status) and liveness.reachable(status)
        if reached and node.state() in LIVE:
            return node
    statuses = [node.status() for node in run.nodes()]
    hosts = [listing.place(status) for status in statuses if status is not None]
    if run.state() not in LIVE:
        raise _ended(run, "It ended a moment ago.")
    if not hosts:
        raise CppmegaError(
            "run-still-running",
            f"{run.name} has no process in charge yet.",
            "Nothing would receive the request.",
            f"wait a moment: {command}",
        )
    raise CppmegaError(
        "run-elsewhere",
        f"{run.name} runs on {', '.join(hosts)}; this is {socket.gethostname()}.",
        "Its processes can be reached only there.",
        f"on {hosts[0]}: {command}",
    )
