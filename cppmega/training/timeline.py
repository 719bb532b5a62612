"""What a device did in the steps of a trace: busy, waiting, by kernel, and the gaps between them.

Busy is the union of all work over the streams, waiting is the rest of the steps. An instant in
which several kernels run belongs to one of them, so that the kernels add up to the busy time.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cppmega.training.trace import Span, Trace, Work

PYTHON = "Python between operators"
LAUNCHED = "launch latency"
"""The next kernel had been launched already."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A gap: nothing runs on the device."""

    start: int
    end: int
    before: Work | None
    """The work that ended last; None at the beginning of the profile."""
    after: Work | None
    """The work that starts next; None at its end."""


def windows(trace: Trace) -> list[Span]:
    """The steps without holes: each lasts until the next one begins."""
    steps = trace.steps
    ends = [*(step.start for step in steps[1:]), steps[-1].end]
    return [Span(step.start, end, step.name) for step, end in zip(steps, ends, strict=True)]


def own_times(
    work: Sequence[Work], start: int, end: int, background: Callable[[Work], bool]
) -> list[int]:
    """The nanoseconds of a window that belong to each piece of work.

    An instant belongs to the foreground work that started first, or else to the background work
    that started first.
    """
    own = [0] * len(work)
    order = sorted(range(len(work)), key=lambda at: work[at].span.start)
    taken: list[tuple[int, int, int]] = []
    """Of the foreground: begin, end, and the time that it has taken before."""

    def of_foreground(time: int) -> int:
        at = bisect.bisect_right(taken, time, key=lambda one: one[0]) - 1
        return taken[at][2] + min(time, taken[at][1]) - taken[at][0] if at >= 0 else 0

    busy = 0
    for is_background in (False, True):
        now = start
        for at in [at for at in order if background(work[at]) == is_background]:
            begins, ends = max(work[at].span.start, now), min(work[at].span.end, end)
            if begins >= ends:
                continue
            now = ends
            if is_background:
                own[at] = ends - begins - (of_foreground(ends) - of_foreground(begins))
            else:
                own[at] = ends - begins
                taken.append((begins, ends, busy))
                busy += ends - begins
    return own


def gaps(work: Sequence[Work], start: int, end: int) -> Iterator[Idle]:
    """The gaps of a window, in order."""
    now, before = start, None
    for one in sorted(work, key=lambda one: one.span):
        if one.span.end <= start or one.span.start >= end:
            continue
        if one.span.start > now:
            yield Idle(now, one.span.start, before, one)
        if one.span.end > now:
            now, before = one.span.end, one
    if now < end:
        yield Idle(now, end, before, None)


def explained(idle: Idle, trace: Trace) -> Counter[str]:
    """What the host did in a gap -> nanoseconds; they add up to the gap.

    The host is the thread that launched the next kernel, and the training loop's after the last.
    """
    after, thread, until = idle.after, trace.thread, idle.end
    if after is not None and after.launched is not None:
        thread, until = after.thread, min(max(after.launched, idle.start), idle.end)
    host, spent = trace.host.get(thread, ()), Counter[str]()
    now = idle.start
    for span in host[bisect.bisect_left(host, now, key=lambda span: span.end) :]:
        if span.start >= until:
            break
        begins, ends = max(span.start, now), min(span.end, until)
        spent[PYTHON] += max(begins - now, 0)
        spent[span.name] += max(ends - begins, 0)
        now = max(now, ends)
    spent[PYTHON] += until - now
    spent[LAUNCHED] += idle.end - until
    return +spent
