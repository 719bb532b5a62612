"""The trace of torch.profiler in the terms of a profile: what the device ran, what the host did.

Times are integers, in nanoseconds, so that parts add up exactly.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from cppmega.host import json_text

_STEP = re.compile(r"ProfilerStep#\d+$")
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})
_HOST = frozenset({"cpu_op", "user_annotation"})
_CONTAINER = re.compile(
    r"ProfilerStep#|autograd::engine::evaluate_function: |Checkpoint\w*Function(Backward)?$"
)
"""Spans that only contain other operators: "in the backward pass" would not explain a wait."""
_BLOCKING = re.compile(
    r"cuda(Stream|Device|Event)Synchronize|cu(Stream|Ctx|Event)Synchronize|"
    r"cuda(Memcpy|Malloc|Free)$"
)
"""Calls in which the host waits for the device."""


class _Arguments(msgspec.Struct, frozen=True):
    correlation: int = 0


class _Device(msgspec.Struct, frozen=True):
    name: str = ""


class _Event(msgspec.Struct, frozen=True):
    ph: str = ""
    cat: str = ""
    name: str = ""
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: _Arguments = _Arguments()

    def span(self) -> Span:
        start = round(self.ts * 1000)
        return Span(start, start + round(self.dur * 1000), self.name)


class _File(msgspec.Struct, rename="camel", frozen=True):
    trace_events: list[_Event]
    device_properties: list[_Device] = []


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Something with a name that took its time, in nanoseconds."""

    start: int
    end: int
    name: str


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel, a copy or a fill on the device."""

    span: Span
    thread: int | str = 0
    """The thread of the host that launched it."""
    launched: int | None = None
    """When the call that launched it had returned; None: unknown."""
    inside: tuple[str, ...] = ()
    """The operators that launched it, the outermost first."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace, read."""

    device: str
    steps: tuple[Span, ...]
    work: tuple[Work, ...]
    host: dict[int | str, tuple[Span, ...]] = field(default_factory=dict)
    """By thread: what the host was in, in sequence; time in no operator is Python's."""
    synchronizations: tuple[Span, ...] = ()
    thread: int | str = 0
    """The thread of the training loop."""


def parse(data: bytes) -> Trace:
    """Read a trace in Chrome's format.

    Raises:
        msgspec.DecodeError: the text is not such a trace, or is cut off.
    """
    file = json_text.decode(data, _File)
    by_category: dict[str, list[_Event]] = defaultdict(list)
    for event in file.trace_events:
        if event.ph == "X":
            by_category[event.cat].append(event)
    return _trace(by_category, [device.name for device in file.device_properties])


def _trace(events: dict[str, list[_Event]], devices: list[str]) -> Trace:
    threads: dict[int | str, list[Span]] = defaultdict(list)
    for event in _of(events, _HOST):
        threads[event.tid].append(event.span())
    for spans in threads.values():
        spans.sort(key=_nesting)
    runtime = list(_of(events, _RUNTIME))
    blocking = [event for event in runtime if _BLOCKING.match(event.name)]
    marks = [event for event in events["user_annotation"] if _STEP.match(event.name)]
    on_device = list(_of(events, _DEVICE))
    host = {
        thread: _occupied(spans, _of_thread(blocking, thread)) for thread, spans in threads.items()
    }
    return Trace(
        device=(devices or ["GPU"])[0],
        steps=tuple(sorted(event.span() for event in marks)),
        work=tuple(_launched(on_device, runtime, threads)),
        host=host,
        synchronizations=tuple(sorted(event.span() for event in blocking)),
        thread=marks[0].tid if marks else 0,
    )


def _of(events: dict[str, list[_Event]], categories: Iterable[str]) -> Iterator[_Event]:
    for category in sorted(categories):
        yield from events[category]


def _of_thread(events: Iterable[_Event], thread: int | str) -> list[Span]:
    return [event.span() for event in events if event.tid == thread]


def _nesting(span: Span) -> tuple[int, int]:
    """A key that sorts what contains something before what it contains."""
    return span.start, -span.end


def _launched(
    on_device: list[_Event], runtime: list[_Event], threads: dict[int | str, list[Span]]
) -> Iterator[Work]:
    """The work of a GPU, with the operators around the call that launched it."""
    calls = {event.args.correlation: event for event in runtime if event.args.correlation}
    wanted: dict[int | str, list[int]] = defaultdict(list)
    for event in calls.values():
        wanted[event.tid].append(event.span().start)
    around = {
        (thread, time): names
        for thread, times in wanted.items()
        for time, names in _enclosing(threads[thread], sorted(times))
    }
    for event in on_device:
        started = calls.get(event.args.correlation)
        if started is None:
            yield Work(event.span())
        else:
            at = started.span()
            yield Work(event.span(), started.tid, at.end, around[started.tid, at.start])


def _enclosing(spans: Sequence[Span], times: list[int]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The names of the spans around each time, in the order of both."""
    open_: list[Span] = []
    at = 0
    for time in times:
        while at < len(spans) and spans[at].start <= time:
            open_ = [span for span in open_ if span.end > spans[at].start]
            open_.append(spans[at])
            at += 1
        yield time, tuple(span.name for span in open_ if span.end > time)


def _occupied(spans: Sequence[Span], blocking: Sequence[Span]) -> tuple[Span, ...]:
    """What a thread was in, in sequence: first blocking calls, then outermost operators."""
    outermost: list[Span] = []
    for span in spans:
        if not _CONTAINER.match(span.name) and (not outermost or span.start >= outermost[-1].end):
            outermost.append(span)
    cut: list[Span] = []
    stops = sorted(blocking)
    starts = [span.start for span in stops]
    for span in outermost:
        at = span.start
        for stop in stops[bisect.bisect_left(starts, span.start) :]:
            if stop.start >= span.end:
                break
            cut += [Span(at, stop.start, span.name)] if at < stop.start else []
            at = max(at, stop.end)
        cut += [Span(at, span.end, span.name)] if at < span.end else []
    return tuple(sorted([*cut, *stops]))
