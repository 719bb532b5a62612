"""Timing with CUDA events, and the software stack: shared by the benchmarks of kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from datetime import date
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cppmega.host.packages import version

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
            torch.cuda._sleep(QUEUED)
        start.record()
        work(*arguments)
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return times


def median(work: Callable[..., Any], *arguments: Any, queued: bool = False) -> float:
    """Median milliseconds of 10 calls, after 2 for warm-up."""
    return statistics.median(elapsed(work, *arguments, repeats=12, queued=queued)[2:])


def by_kernel(work: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """Milliseconds of each kernel in one call, after one for warm-up, longest first."""
    work(*arguments)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work(*arguments)
        torch.cuda.synchronize()
    times = {event.key: event.self_device_time_total / 1e3 for event in seen.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


@cache
def upstream_of(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A gradient of an output that is not uniform, made once so that no timed call makes it."""
    return torch.linspace(-1, 1, shape.numel(), device="cuda").view(shape).to(dtype)


def stack(*packages: str) -> dict[str, str]:
    """Date, GPU, and versions of torch and of these packages, for the header of a report."""
    return {
        "date": date.today().isoformat(),
        "GPU": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **{name: version(name) or "not installed" for name in packages},
    }


def card(name: str | None = None) -> str:
    """The word for a GPU in names of results: `h100` for `NVIDIA H100 80GB HBM3`."""
    return (name or torch.cuda.get_device_name()).removeprefix("NVIDIA ").split()[0].lower()
