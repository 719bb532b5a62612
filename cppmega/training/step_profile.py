"""Compute the profile of a trace's steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cppmega.runs.profile import (
    OTHER,
    Gap,
    KernelTotal,
    KindTotal,
    Profile,
    StepTime,
    Wait,
)
from cppmega.training import timeline
from cppmega.training.kernel_kinds import Kinds
from cppmega.training.timeline import Idle
from cppmega.training.trace import Span, Trace, Work

_LONGEST_KERNELS = 10
_LONGEST_GAPS = 10
_NANOSECONDS = 1e6
"""Nanoseconds in a millisecond."""


@dataclass(slots=True)
class _Sum:
    own: int = 0
    summed: int = 0
    launches: int = 0

    def add(self, own: int, work: Work) -> None:
        self.own += own
        self.summed += work.span.end - work.span.start
        self.launches += 1


def profile_of(trace: Trace, first_step: int, **facts: Any) -> Profile:
    """Aggregate a trace.

    Args:
        trace: has at least one step.
        first_step: number of its first step in the run.
        facts: the other fields of the profile.
    """
    windows = timeline.windows(trace)
    start, end, count = windows[0].start, windows[-1].end, len(windows)
    work = [one for one in trace.work if one.span.end > start and one.span.start < end]
    kinds = Kinds(trace)
    own = timeline.own_times(work, start, end, kinds.in_background)
    idle = list(timeline.gaps(work, start, end))
    busy, waiting = sum(own), sum(gap.end - gap.start for gap in idle)
    stops = [span for span in trace.synchronizations if start <= span.start < end]
    if stops and stops[-1].name == "cudaDeviceSynchronize":
        stops.pop()  # the profiler's own time
    steps = _Steps(windows, first_step)
    return Profile(
        device=trace.device,
        steps=steps.times(work, idle),
        step_ms=_ms(end - start, count),
        busy_ms=_ms(busy, count),
        waiting_ms=_ms(waiting, count),
        waiting_share=waiting / (end - start),
        launches=len(work) / count,
        synchronizations=len(stops) / count,
        synchronizing_ms=_ms(sum(span.end - span.start for span in stops), count),
        kinds=_kinds(work, own, kinds, end - start, count),
        waits=_waits(idle, trace, count),
        gaps=tuple(steps.gap(gap, trace) for gap in _longest(idle)),
        **facts,
    )


def _ms(nanoseconds: int, count: int = 1) -> float:
    return nanoseconds / _NANOSECONDS / count


@dataclass(frozen=True, slots=True)
class _Steps:
    windows: list[Span]
    first: int

    def times(self, work: Sequence[Work], idle: Sequence[Idle]) -> tuple[StepTime, ...]:
        """Each step, with what runs and starts in it."""
        return tuple(
            StepTime(
                step=self.first + at,
                ms=_ms(window.end - window.start),
                busy_ms=_ms(window.end - window.start - _inside(idle, window)),
                launches=sum(self.step_of(one.span.start) == at for one in work),
            )
            for at, window in enumerate(self.windows)
        )

    def step_of(self, time: int) -> int:
        """The index of the step in which an instant is; the first one if it is before."""
        return max(sum(window.start <= time for window in self.windows) - 1, 0)

    def gap(self, idle: Idle, trace: Trace) -> Gap:
        """A gap, which may extend into the next step."""
        at = self.step_of(idle.start)
        host = sorted(timeline.explained(idle, trace).items(), key=lambda item: -item[1])
        return Gap(
            step=self.first + at,
            at_ms=_ms(idle.start - self.windows[at].start),
            ms=_ms(idle.end - idle.start),
            before=idle.before.span.name if idle.before else "",
            after=idle.after.span.name if idle.after else "",
            host={name: _ms(time) for name, time in host},
        )


def _inside(idle: Sequence[Idle], window: Span) -> int:
    """The nanoseconds of a window in which nothing runs."""
    parts = (min(gap.end, window.end) - max(gap.start, window.start) for gap in idle)
    return sum(part for part in parts if part > 0)


def _longest(idle: Sequence[Idle]) -> list[Idle]:
    return sorted(idle, key=lambda gap: gap.start - gap.end)[:_LONGEST_GAPS]


def _kinds(
    work: Sequence[Work], own: Sequence[int], kinds_of: Kinds, window: int, count: int
) -> tuple[KindTotal, ...]:
    kinds: dict[str, _Sum] = defaultdict(_Sum)
    kernels: dict[str, dict[str, _Sum]] = defaultdict(lambda: defaultdict(_Sum))
    for one, time in zip(work, own, strict=True):
        kind = kinds_of.of(one)
        kinds[kind].add(time, one)
        kernels[kind][one.span.name].add(time, one)
    return tuple(
        KindTotal(
            kind=kind,
            ms=_ms(total.own, count),
            share=total.own / window,
            summed_ms=_ms(total.summed, count),
            launches=total.launches / count,
            kernels=_kernels(kernels[kind], count, None if kind == OTHER else _LONGEST_KERNELS),
        )
        for kind, total in sorted(kinds.items(), key=lambda item: -item[1].own)
    )


def _kernels(totals: dict[str, _Sum], count: int, how_many: int | None) -> tuple[KernelTotal, ...]:
    longest = sorted(totals.items(), key=lambda item: -item[1].own)[:how_many]
    return tuple(
        KernelTotal(name=name, ms=_ms(total.own, count), launches=total.launches / count)
        for name, total in longest
    )


def _waits(idle: Sequence[Idle], trace: Trace, count: int) -> tuple[Wait, ...]:
    times: dict[str, int] = defaultdict(int)
    gaps: dict[str, int] = defaultdict(int)
    for gap in idle:
        for name, time in timeline.explained(gap, trace).items():
            times[name] += time
            gaps[name] += 1
    return tuple(
        Wait(host=name, ms=_ms(time, count), gaps=gaps[name] / count)
        for name, time in sorted(times.items(), key=lambda item: -item[1])
    )
