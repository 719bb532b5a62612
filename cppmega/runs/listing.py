"""The table of all runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec

from cppmega.host import console
from cppmega.runs import failures, liveness
from cppmega.runs.folder import LIVE, Run, RunState
from cppmega.runs.status import Status

_STYLES: dict[RunState, console.Style] = {
    "crashed": "bad",
    "killed": "bad",
    "running": "good",
    "finished": "note",
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as `cppmega runs --json` prints it."""

    name: str
    state: RunState
    exit: int | None
    recipe: str
    overlay: str
    created: float | None
    seconds: float | None
    step: int | None
    loss: float | None
    checkpoint: int | None
    tmux: str | None
    hosts: tuple[str | None, ...]
    error: str
    folder: str


def row_of(run: Run) -> Row:
    """Inspect a run."""
    last, outline = run.last_step(), run.outline
    statuses = [node.status() for node in run.nodes()]
    ends = [status.ended for status in statuses if status is not None and status.ended]
    return Row(
        name=run.name,
        state=run.state(),
        exit=run.exit(),
        recipe=outline.recipe.name,
        overlay=outline.digest,
        created=outline.created,
        seconds=_seconds(outline.created, max(ends) if ends else time.time()),
        step=last.step if last is not None else None,
        loss=last.loss if last is not None else None,
        checkpoint=run.checkpoint(),
        tmux=outline.tmux,
        hosts=tuple(status.host if status is not None else None for status in statuses),
        error=run.problem or failures.in_one_line(run) or _silence(run),
        folder=str(run.path),
    )


def _silence(run: Run) -> str:
    """What suggests that a run on another machine is not alive."""
    for node in run.nodes():
        status, silent = node.status(), liveness.silence(node.status_file)
        if silent and status and node.state() in LIVE and not liveness.in_charge(status):
            return f"no sign of life from {place(status)} for {_duration(silent)}"
    return ""


def place(status: Status) -> str:
    """Where a part of a run is, if it cannot be reached from here."""
    return f"{status.host}{', in another container' if liveness.here(status) else ''}"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each run, and its error on a second one."""
    width = max([4, *(len(row.name) for row in rows)])
    head = f"{'STATE':<9} {'NAME':<{width}} {'EXIT':>4} {'STEP':>7} {'LOSS':>8} {'SAVED':>7} "
    yield head + f"{'TIME':>8} {'OVERLAY':<16} TMUX"
    for row in rows:
        state = console.styled(f"{row.state:<9}", _STYLES.get(row.state))
        loss = "-" if row.loss is None else f"{row.loss:.4f}"
        yield (
            f"{state} {row.name:<{width}} {_or_dash(row.exit):>4} {_or_dash(row.step):>7} "
            f"{loss:>8} {_or_dash(row.checkpoint):>7} {_duration(row.seconds):>8} "
            f"{row.overlay:<16} {row.tmux or '-'}"
        )
        if row.error:
            yield f"{'':<9} {row.error}"


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
