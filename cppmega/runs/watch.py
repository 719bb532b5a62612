"""Watch live runs: how far they are, when they will end, and whether they still make progress."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from cppmega.runs import failures, metrics, rank_progress
from cppmega.runs.folder import LIVE, Run, RunState
from cppmega.runs.listing import duration
from cppmega.runs.manifest import Manifest
from cppmega.runs.metrics import LoggedStep
from cppmega.runs.spikes import Spikes

_POLL = 1.0
"""Seconds between two readings of the files."""
_PATIENCE = 15.0
"""Seconds within which no run counts as stalled, however short its steps: it may be saving."""
_RECENT = 50
"""Logged steps from which the usual step time is computed."""
_PIPELINE = "--pipeline-model-parallel-size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The state of one run at one moment."""

    run: Run
    state: RunState
    last: LoggedStep | None = None
    end: int | None = None
    """The step at which it will end by itself, if that is known."""
    per_step: float | None = None
    """Median seconds of the last steps."""
    saves_at: int | None = None
    """The step of its next checkpoint."""
    stall: str = ""
    spike: str = ""
    """The last one, if it is recent."""
    error: str = ""

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return self.state in LIVE

    @property
    def step(self) -> int:
        """The last logged step; 0 before the first."""
        return self.last.step if self.last is not None else 0

    def until(self, step: int | None) -> float | None:
        """Seconds until a step, if the run continues at this speed."""
        if step is None or self.per_step is None:
            return None
        return max(0, step - self.step) * self.per_step


def look(run: Run, stalled_after: float, now: float | None = None) -> Sight:
    """Read the files of a run.

    Args:
        stalled_after: times the usual distance of two logged steps.
        now: seconds since the epoch; None: the clock.
    """
    run = Run(run.path)  # whose manifest may have been written since
    steps, state = metrics.last_steps(run.logged), run.state()
    if not steps:
        return Sight(run=run, state=state, error=_error(run))
    last, distance = steps[-1], _distance(steps)
    sight = Sight(
        run=run,
        state=state,
        last=last,
        end=_end(run, last.step),
        per_step=median(step.seconds for step in steps[-_RECENT:]),
        spike=_spike(steps),
        error=_error(run),
    )
    sight = replace(sight, saves_at=_next_checkpoint(run, last.step, sight.end))
    silent = (time.time() if now is None else now) - metrics.last_written(run.logged)
    if sight.live and distance and silent > max(_PATIENCE, stalled_after * distance):
        sight = replace(sight, stall=_stall(run, last.step, silent, distance))
    return sight


def _error(run: Run) -> str:
    return run.problem or failures.in_one_line(run)


def _distance(steps: Sequence[LoggedStep]) -> float:
    """The usual seconds between two logged steps; 0 if there is only one."""
    pairs = list(pairwise(steps[-_RECENT:]))
    return median(b.seconds * max(1, b.step - a.step) for a, b in pairs) if pairs else 0.0


def _spike(steps: Sequence[LoggedStep]) -> str:
    """The last spike among the recent steps."""
    spikes = Spikes()
    remarks = [(step.step, spikes.remark(step.loss, step.grad_norm)) for step in steps]
    recent = (f"step {step}: {text}" for step, text in reversed(remarks[-_RECENT:]) if text)
    return next(recent, "")


def _end(run: Run, step: int) -> int | None:
    start, outline = metrics.first_start(run.logged), run.outline
    total = start.train_iters if start is not None else None
    interval = outline.options.exit_interval if isinstance(outline, Manifest) else None
    ends = [total, _multiple(interval, step) if interval else None]
    return min((end for end in ends if end is not None), default=None)


def _next_checkpoint(run: Run, step: int, end: int | None) -> int | None:
    outline = run.outline
    if not isinstance(outline, Manifest) or outline.save is None:
        return None
    interval = outline.options.save_interval
    steps = [_multiple(interval, step) if interval else None, end]
    return min((at for at in steps if at is not None), default=None)


def _multiple(interval: int, step: int) -> int:
    """The next multiple after a step."""
    return (step // interval + 1) * interval


def _stall(run: Run, step: int, silent: float, distance: float) -> str:
    late = rank_progress.behind(run, slack=_pipeline(run) - 1)
    return (
        f"no step after {step} for {duration(silent)}, {silent / distance:.0f} times the usual; "
        f"{late or 'which rank is behind is not known here'}"
    )


def _pipeline(run: Run) -> int:
    """Stages of the pipeline."""
    outline = run.outline
    words = outline.arguments if isinstance(outline, Manifest) else ()
    sizes = [value for flag, value in pairwise(words) if flag == _PIPELINE]
    return int(sizes[-1]) if sizes and sizes[-1].isdigit() else 1


def line(sight: Sight) -> str:
    """A run in one line, for a log."""
    last, head = sight.last, f"{sight.state} {sight.run.name}:"
    if last is None:
        return "; ".join([f"{head} no step yet", *_remarked(sight)])
    values = [
        f"step {last.step}" + (f"/{sight.end}" if sight.end is not None else ""),
        f"loss {last.loss:.4f}" if last.loss is not None else "",
        f"grad norm {last.grad_norm:.3g}" if last.grad_norm is not None else "",
        f"{last.tokens_per_second:.0f} tokens/s" if last.tokens_per_second is not None else "",
    ]
    if sight.live:
        values += [_due("checkpoint", sight, sight.saves_at), _due("end", sight, sight.end)]
    return "; ".join([f"{head} {', '.join(filter(None, values))}", *_remarked(sight)])


def _due(what: str, sight: Sight, step: int | None) -> str:
    seconds = sight.until(step)
    return "" if seconds is None else f"{what} in {duration(seconds)}"


def _remarked(sight: Sight) -> Iterator[str]:
    """Warnings that need attention."""
    if sight.stall:
        yield f"STALLED: {sight.stall}"
    if sight.spike:
        yield f"SPIKE: {sight.spike}"
    if sight.error:
        yield sight.error


def sights(runs: Sequence[Run], stalled_after: float) -> Iterator[list[Sight]]:
    """Poll the runs until all have ended."""
    while True:
        seen = [look(run, stalled_after) for run in runs]
        yield seen
        if not any(sight.live for sight in seen):
            return
        time.sleep(_POLL)


def lines(rounds: Iterator[list[Sight]], every: float) -> Iterator[str]:
    """The lines of a log: about each run periodically, and whenever it needs attention.

    Args:
        every: seconds between two lines about a run without problems.
    """
    told: dict[Run, tuple[float, Sight]] = {}
    for seen in rounds:
        for sight in seen:
            when, before = told.get(sight.run, (0.0, None))
            due = time.monotonic() - when >= every
            if before is None or _is_news(before, sight) or (due and sight.step != before.step):
                told[sight.run] = time.monotonic(), sight
                yield line(sight)


def _is_news(before: Sight, now: Sight) -> bool:
    # The length of a stall changes with every poll; the fact that there is one does not.
    stalled = bool(now.stall) and not before.stall
    spiked = bool(now.spike) and now.spike != before.spike
    return stalled or spiked or (now.state, now.error) != (before.state, before.error)
