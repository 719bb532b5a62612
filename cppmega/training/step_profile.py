"""Compute the profile of a trace's steps."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from heapq import nlargest
from typing import Any

from cppmega.runs.profile import OTHER, Gap, KernelTotal, KindTotal, Profile, StepTime, Wait
from cppmega.training import timeline
from cppmega.training.kernel_kinds import Kinds
from cppmega.training.timeline import Idle
from cppmega.training.trace import Span, Trace, Work

_LONGEST_KERNELS = 10
_LONGEST_GAPS = 10
_NANOSECONDS = 1e6
"""Nanoseconds in a millisecond."""


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
    waiting = sum(gap.end - gap.start for gap in idle)
    stops = [span for span in trace.synchronizations if start <= span.start < end]
    if stops and stops[-1].name == "cudaDeviceSynchronize":
        stops.pop()  # the profiler's own time
    longest = nlargest(_LONGEST_GAPS, idle, key=lambda gap: gap.end - gap.start)
    return Profile(
        device=trace.device,
        steps=_steps(windows, first_step, work, idle),
        step_ms=_ms(end - start, count),
        busy_ms=_ms(sum(own), count),
        waiting_ms=_ms(waiting, count),
        waiting_share=waiting / (end - start),
        launches=len(work) / count,
        synchronizations=len(stops) / count,
        synchronizing_ms=_ms(sum(span.end - span.start for span in stops), count),
        kinds=_kinds(work, own, kinds, end - start, count),
        waits=_waits(idle, trace, count),
        gaps=tuple(_gap(gap, windows, first_step, trace) for gap in longest),
        **facts,
    )


def _ms(nanoseconds: int, count: int = 1) -> float:
    return nanoseconds / _NANOSECONDS / count


def _step_of(windows: Sequence[Span], time: int) -> int:
    """The index of the step in which an instant is; the first one if it is before."""
    return max(bisect.bisect_right(windows, time, key=lambda window: window.start) - 1, 0)


def _steps(
    windows: Sequence[Span], first: int, work: Sequence[Work], idle: Sequence[Idle]
) -> tuple[StepTime, ...]:
    """Each step, with what runs and starts in it."""
    launches = Counter(_step_of(windows, one.span.start) for one in work)
    waiting: Counter[int] = Counter()
    for gap in idle:
        for at, window in enumerate(windows):
            waiting[at] += max(min(gap.end, window.end) - max(gap.start, window.start), 0)
    return tuple(
        StepTime(
            step=first + at,
            ms=_ms(window.end - window.start),
            busy_ms=_ms(window.end - window.start - waiting[at]),
            launches=launches[at],
        )
        for at, window in enumerate(windows)
    )


def _gap(idle: Idle, windows: Sequence[Span], first: int, trace: Trace) -> Gap:
    """A gap, which may extend into the next step."""
    at = _step_of(windows, idle.start)
    return Gap(
        step=first + at,
        at_ms=_ms(idle.start - windows[at].start),
        ms=_ms(idle.end - idle.start),
        before=idle.before.span.name if idle.before else "",
        after=idle.after.span.name if idle.after else "",
        host={name: _ms(time) for name, time in timeline.explained(idle, trace).most_common()},
    )


def _kinds(
    work: Sequence[Work], own: Sequence[int], kinds: Kinds, window: int, count: int
) -> tuple[KindTotal, ...]:
    # By kind, and by kind and kernel.
    times: Counter[tuple[str, ...]] = Counter()
    launches: Counter[tuple[str, ...]] = Counter()
    summed: Counter[str] = Counter()
    for one, time in zip(work, own, strict=True):
        kind = kinds.of(one)
        for key in ((kind,), (kind, one.span.name)):
            times[key] += time
            launches[key] += 1
        summed[kind] += one.span.end - one.span.start
    longest = times.most_common()
    totals = []
    for (kind,), time in [pair for pair in longest if len(pair[0]) == 1]:
        kernels = [
            KernelTotal(name=key[1], ms=_ms(ns, count), launches=launches[key] / count)
            for key, ns in longest
            if len(key) == 2 and key[0] == kind
        ]
        total = KindTotal(
            kind=kind,
            ms=_ms(time, count),
            share=time / window,
            summed_ms=_ms(summed[kind], count),
            launches=launches[kind,] / count,
            kernels=tuple(kernels if kind == OTHER else kernels[:_LONGEST_KERNELS]),
        )
        totals.append(total)
    return tuple(totals)


def _waits(idle: Sequence[Idle], trace: Trace, count: int) -> tuple[Wait, ...]:
    each = [timeline.explained(gap, trace) for gap in idle]
    times = sum(each, Counter[str]())
    gaps = Counter(name for times_of_gap in each for name in times_of_gap)
    return tuple(
        Wait(host=name, ms=_ms(time, count), gaps=gaps[name] / count)
        for name, time in times.most_common()
    )
