"""`cppmega runs --watch`: a table that is redrawn in a terminal, lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import click

from cppmega.cli.group import FINE, NOT_AS_IT_MUST_BE
from cppmega.host import console
from cppmega.runs import watch as watching
from cppmega.runs.folder import LIVE, Run
from cppmega.runs.listing import duration
from cppmega.runs.watch import Sight

if TYPE_CHECKING:
    from rich.console import Group

_COLUMNS = ("RUN", "STATE", "STEP", "LOSS", "GRAD NORM", "TOKENS/S", "CHECKPOINT IN", "END IN")
_BUSY = "GPU BUSY"


def watch(runs: Sequence[Run], named: bool, every: float, stalled_after: float) -> int:
    """Watch runs until all have ended.

    Args:
        runs: those of which the live ones are watched.
        named: watch all of them, since the user named them.

    Returns:
        The exit status.
    """
    watched = [run for run in runs if named or run.state() in LIVE]
    if not watched:
        console.say("no run is live: cppmega runs lists those that ended")
        return FINE
    seen: list[Sight] = []
    try:
        rounds = _keeping_last(watching.sights(watched, stalled_after), seen)
        if sys.stdout.isatty():
            _draw(rounds)
        else:
            for line in watching.lines(rounds, every):
                click.echo(line)
    except KeyboardInterrupt:
        return FINE
    ended_badly = any(sight.state in ("crashed", "killed") for sight in seen)
    return NOT_AS_IT_MUST_BE if ended_badly else FINE


def _keeping_last(rounds: Iterator[list[Sight]], last: list[Sight]) -> Iterator[list[Sight]]:
    """Pass the rounds on, and keep the latest one in `last`."""
    for seen in rounds:
        last[:] = seen
        yield seen


def _draw(rounds: Iterator[list[Sight]]) -> None:
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for seen in rounds:
            live.update(_table(seen), refresh=True)


def _table(seen: Sequence[Sight]) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    on_gpus = any(sight.busy for sight in seen)
    for column in (*_COLUMNS, *[_BUSY] * on_gpus):
        justify: Literal["left", "right"] = "left" if column in _COLUMNS[:2] else "right"
        table.add_column(column, justify=justify, overflow="fold")
    for sight in seen:
        busy = watching.percent(sight.busy) if sight.busy else "-"
        table.add_row(*map(Text, (*_cells(sight), *[busy] * on_gpus)))
    remarks = [
        Text(f"{sight.run.name}: {remark}", style="bold red")
        for sight in seen
        for remark in watching.remarked(sight)
    ]
    return Group(table, *remarks)


def _cells(sight: Sight) -> Iterator[str]:
    last = sight.last
    yield sight.run.name
    yield sight.state
    yield f"{sight.step}/{sight.end}" if sight.end is not None else str(sight.step)
    yield "-" if last is None or last.loss is None else f"{last.loss:.4f}"
    yield "-" if last is None or last.grad_norm is None else f"{last.grad_norm:.3g}"
    speed = last.tokens_per_second if last is not None else None
    yield "-" if speed is None else f"{speed:.0f}"
    yield duration(sight.until(sight.saves_at) if sight.live else None)
    yield duration(sight.until(sight.end) if sight.live else None)
