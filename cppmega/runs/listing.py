"""The table of all runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from cppmega.host import console
from cppmega.host import table as host_table
from cppmega.host.wording import counted
from cppmega.runs import failures, liveness, metrics
from cppmega.runs.folder import LIVE, Run, RunState
from cppmega.runs.metrics import HeldOutLoss
from cppmega.runs.status import Status

_STYLES: dict[RunState, console.Style] = {
    "crashed": "bad",
    "killed": "bad",
    "running": "good",
    "finished": "note",
}
_HEAD = host_table.Row(
    ("STATE", "NAME", "EXIT", "STEP", "LOSS", "SAVED", "TIME", "OVERLAY", "TMUX")
)
_WIDTHS = (9, 4, 4, 5, 7, 5, 8, 16)
_RIGHT = range(2, 7)


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
    held_out: HeldOutLoss | UnsetType = UNSET
    """The last evaluation, if it is recent."""
    checkpoint: int | None
    tmux: str | None
    hosts: tuple[str | None, ...]
    error: str
    folder: str
    fallbacks: tuple[str, ...] | UnsetType = UNSET
    """Pages whose declined calls Megatron's own code may compute."""
    profiled_steps: int | UnsetType = UNSET
    """Their throughput is not a benchmark."""


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
        held_out=metrics.last_evaluation(run.logged) or UNSET,
        checkpoint=run.checkpoint(),
        tmux=outline.tmux,
        hosts=tuple(status.host if status is not None else None for status in statuses),
        error=run.problem or failures.in_one_line(run) or _silence(run),
        folder=str(run.path),
        fallbacks=outline.overlay.fallbacks if outline.overlay is not None else UNSET,
        profiled_steps=run.profiled_steps or UNSET,
    )


def _silence(run: Run) -> str:
    """A sign that a run on another machine is not alive; empty if there is none."""
    for node in run.nodes():
        status, silent = node.status(), liveness.silence(node.status_file)
        if silent and status and node.state() in LIVE and not liveness.in_charge(status):
            return f"no sign of life from {place(status)} for {duration(silent)}"
    return ""


def place(status: Status) -> str:
    """The location of a part of a run, if it cannot be reached from here."""
    return f"{status.host}{', in another container' if liveness.here(status) else ''}"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each run; its error, held-out losses and the like are on further ones."""
    lines = host_table.table([_HEAD, *map(_cells, rows)], _WIDTHS, _RIGHT)
    yield next(lines)
    for row, line in zip(rows, lines, strict=True):
        yield line
        if row.error:
            yield f"{'':<{_WIDTHS[0]}}  {row.error}"
        if row.held_out:
            losses = ", ".join(f"{name} {loss:.4f}" for name, loss in row.held_out.losses.items())
            yield f"{'':<{_WIDTHS[0]}}  held out after step {row.held_out.evaluated}: {losses}"
        if row.fallbacks:
            yield f"{'':<{_WIDTHS[0]}}  declined calls allowed: {', '.join(row.fallbacks)}"
        if row.profiled_steps:
            profiled = (
                f"profiled: {counted(row.profiled_steps, 'step')}, see cppmega profile {row.name}"
            )
            yield f"{'':<{_WIDTHS[0]}}  {profiled}"


def _cells(row: Row) -> host_table.Row:
    cells = (
        *(row.state, row.name, _or_dash(row.exit), _or_dash(row.step)),
        *("-" if row.loss is None else f"{row.loss:.4f}", _or_dash(row.checkpoint)),
        *(duration(row.seconds), row.overlay, row.tmux or "-"),
    )
    return host_table.Row(cells, _STYLES.get(row.state))


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _seconds(created: float | None, until: float) -> float | None:
    return None if created is None else max(0.0, until - created)  # clocks may be set back


def duration(seconds: float | None) -> str:
    """Seconds as hours, minutes and seconds."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
