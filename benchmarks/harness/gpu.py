"""Time, memory and distances on a GPU: every benchmark of kernels measures with these."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

GIB = float(1 << 30)
QUEUED = 20_000_000
"""Cycles (about 10 ms) for which the GPU is kept busy while the host queues the measured work."""


def elapsed(
    work: Callable[..., Any], *arguments: Any, repeats: int = 10, queued: bool = False
) -> list[float]:
    """Milliseconds of each call; `queued`: launched while the GPU is busy, so without host time."""
    times = []
    for _ in range(repeats):
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        if queued:
            torch.cuda._sleep(QUEUED)  # type: ignore[no-untyped-call]
        start.record()
        work(*arguments)
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return times


def median(work: Callable[..., Any], *arguments: Any, queued: bool = False) -> float:
    """Median milliseconds of 10 calls, after 2 for warm-up."""
    return statistics.median(elapsed(work, *arguments, repeats=12, queued=queued)[2:])


def timed(work: Callable[[], Any], repeats: int = 10, warm_up: int = 3) -> dict[str, float]:
    """Median milliseconds, and the peak in GiB above what was allocated before."""
    for _ in range(warm_up):
        work()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held, found = torch.cuda.memory_allocated(), elapsed(work, repeats=repeats)
    peak = (torch.cuda.max_memory_allocated() - held) / GIB
    return {"milliseconds": round(statistics.median(found), 3), "peak_gib": round(peak, 2)}


def rounds(names: Iterable[str], count: int) -> Iterator[tuple[int, str]]:
    """The number of the round and a name: each name once per round, in another order each time."""
    every = list(names)
    for turn in range(count):  # after a slow implementation the card is cool, its clocks are high
        for name in random.Random(turn).sample(every, len(every)):
            yield turn, name


def by_kernel(work: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """Milliseconds of each kernel in one call, after one for warm-up, longest first."""
    work(*arguments)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work(*arguments)
        torch.cuda.synchronize()
    times = {event.key: event.self_device_time_total / 1e3 for event in seen.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def distance(found: Tensor, want: Tensor) -> float:
    """The relative distance in the 2-norm, computed in fp64."""
    found, want = found.detach().double(), want.detach().double()
    return float((found - want).norm() / want.norm())


def distances(
    names: Iterable[str], found: Iterable[Any], want: Iterable[Tensor]
) -> dict[str, float]:
    """The distance of each result by name."""
    return {n: distance(a, b) for n, a, b in zip(names, found, want, strict=True)}


def refuse(who: str, errors: Mapping[str, float], limits: Mapping[str, float] | float) -> None:
    """End the run if a result is wrong: no time of it may be written."""
    for name, error in errors.items():
        limit = limits if isinstance(limits, float) else limits[name]
        if not error <= limit:
            raise SystemExit(f"{who}: {name} differs by {error:.2e}, more than {limit:.0e}")


@cache
def upstream_of(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A gradient of an output that is not uniform, made once so that no timed call makes it."""
    return torch.linspace(-1, 1, shape.numel(), device="cuda").view(shape).to(dtype)


def both_ways(
    call: Callable[..., Any], leaves: Iterable[Tensor], upstream: Iterable[Tensor] | None = None
) -> list[Tensor]:
    """The results of a call, a tensor or several, and the gradients of all that it is given."""
    given = [x.detach().requires_grad_() for x in leaves]
    out = call(*given)
    every = [out] if isinstance(out, Tensor) else list(out)
    of_results = list(upstream or (upstream_of(x.shape, x.dtype) for x in every))
    return [*(x.detach() for x in every), *torch.autograd.grad(every, given, of_results)]


def card(name: str | None = None) -> str:
    """The word for a GPU in names of results: `h100` for `NVIDIA H100 80GB HBM3`."""
    return (name or torch.cuda.get_device_name()).removeprefix("NVIDIA ").split()[0].lower()
