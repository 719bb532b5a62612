"""What a device did in the steps of a trace: busy, waiting, by kernel, and the gaps between them.

Busy is the union of all work over the streams, waiting is the rest of the steps. An instant in
which several kernels run belongs to one of them, so that the kernels add up to the busy time.
"""

from __future__ import annotations

import bisect
import heapq
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
    running: list[tuple[bool, int, int]] = []
    now = start
    for at in order:
        begins = min(max(work[at].span.start, start), end)
        now = _advance(running, work, own, now, begins)
        heapq.heappush(running, (background(work[at]), work[at].span.start, at))
    _advance(running, work, own, now, end)
    return own


def _advance(
    running: list[tuple[bool, int, int]], work: Sequence[Work], own: list[int], now: int, until: int
) -> int:
    """Assign the time up to an instant to the work that is running; returns the instant."""
    while running and now < until:
        at = running[0][2]
        stop = min(work[at].span.end, until)
        if stop > now:
            own[at] += stop - now
            now = stop
        if work[at].span.end <= now:
            heapq.heappop(running)
    return until


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


def explained(idle: Idle, trace: Trace) -> dict[str, int]:
    """What the host did in a gap -> nanoseconds; they add up to the gap.

    The host is the thread that launched the next kernel, and the training loop's after the last.
    """
    after = idle.after
    thread = after.thread if after is not None and after.launched is not None else trace.thread
    until = idle.end
    if after is not None and after.launched is not None:
        until = min(max(after.launched, idle.start), idle.end)
    found = _spent(trace.host.get(thread, ()), idle.start, until)
    if until < idle.end:
        found[LAUNCHED] = idle.end - until
    return found


def _spent(host: Sequence[Span], start: int, end: int) -> dict[str, int]:
    found: dict[str, int] = {}
    first = bisect.bisect_left(host, start, key=lambda span: span.end)
    now = start
    for span in host[first:]:
        if span.start >= end:
            break
        begins, ends = max(span.start, now), min(span.end, end)
        if begins > now:
            found[PYTHON] = found.get(PYTHON, 0) + begins - now
        if ends > begins:
            found[span.name] = found.get(span.name, 0) + ends - begins
        now = max(now, ends)
    if now < end:
        found[PYTHON] = found.get(PYTHON, 0) + end - now
    return found
