"""Profile some steps of a training run, after the warm-up, on rank 0.

    with profiler.step():
        train_step(...)

The device is idle when the first of these steps begins, and the last one ends when the device has
finished, so that all work of the steps is inside them. Nothing else waits for the device.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from cppmega.errors import CppmegaError
from cppmega.host import durable, packages
from cppmega.recipe.run_options import RunOptions
from cppmega.runs import json_file
from cppmega.runs.profile import SUMMARY, TRACE, Profile, lines
from cppmega.training import step_profile
from cppmega.training.trace import Trace, parse

_BEFORE = 2
"""First steps left out of the time without the profiler: they compile and fill caches."""
_COMPRESSION = 4
_DISABLE = "leave --profile out"


def folder_of(options: RunOptions) -> Path:
    """Where the profile of a run is written; a launch names its run folder's own."""
    return options.profile_folder or Path("profile")


class StepProfiler:
    """The steps of a run, some of which are profiled.

    Every rank has one: the rank that logs must know which of its steps the profiler slowed down.
    """

    def __init__(self, options: RunOptions, first_step: int, *, rank: int, **facts: Any) -> None:
        """Prepare the profile, if the options request one.

        Args:
            options: `profile`, `profile_after` and `profile_folder`.
            first_step: number of the first step of this start.
            rank: of this process; only rank 0 is profiled.
            facts: the profile's record of the run: `recipe`, `overlay` and so on.

        Raises:
            CppmegaError: `package-missing`, `write-failed`.
        """
        self._wanted, self._after = options.profile or 0, options.profile_after
        self._folder, self._first = folder_of(options), first_step
        self._records = bool(self._wanted) and rank == 0
        self._facts = {"changes": options.changes, "rank": rank, **facts}
        self._facts["versions"] = _versions() if self._records else {}
        self._done = 0
        self._disturbed = False
        self._step_starts: list[float] = []
        self._profiler: Any = None
        if self._records:
            check_profiler()
            _create(self._folder)

    def around(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that runs one step."""
        if not self._wanted:
            return train_step

        @functools.wraps(train_step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            with self.step():
                return train_step(*args, **kwargs)

        return stepped

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Enclose one step.

        Raises:
            CppmegaError: `write-failed`, `profile-without-kernels`.
        """
        at = self._done - self._after
        profiled = -1 <= at < self._wanted and bool(self._wanted)
        self._disturbed = self._disturbed or profiled
        if self._done <= self._after:
            self._step_starts.append(time.monotonic())
        if self._records and profiled:
            self._begin(at)
        yield
        self._done += 1
        if self._records and at == self._wanted - 1:
            self._end()

    def took_disturbed(self) -> bool:
        """Whether the profiler slowed down a step since the last call."""
        disturbed, self._disturbed = self._disturbed, False
        return disturbed

    def _begin(self, at: int) -> None:
        """Begin a profiled step; the profiler itself starts one step before, to warm up."""
        import torch
        from torch import profiler

        if at == -1:
            activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
            schedule = profiler.schedule(wait=0, warmup=1, active=self._wanted, repeat=1)
            self._profiler = profiler.profile(
                activities=activities, schedule=schedule, acc_events=True
            )
            self._profiler.__enter__()
            return
        if at == 0:
            torch.cuda.synchronize()
        self._profiler.step()

    def _end(self) -> None:
        import torch

        torch.cuda.synchronize()
        self._profiler.__exit__(None, None, None)
        finished, self._profiler = self._profiler, None
        profile = write(
            finished.export_chrome_trace,
            self._folder,
            self._first + self._after,
            unprofiled_step_ms=self._without(),
            **self._facts,
        )
        print("\n".join(lines(profile)), f"\ntrace: {self._folder / TRACE}", flush=True)

    def _without(self) -> float | None:
        """Median of the steps before the profiler was started, in milliseconds."""
        starts = self._step_starts[_BEFORE : self._after]
        each = [after - before for before, after in itertools.pairwise(starts)]
        return 1000 * statistics.median(each) if each else None


def check_profiler() -> None:
    """Check that torch can profile a GPU.

    Raises:
        CppmegaError: `package-missing`.
    """
    from torch import profiler

    public: Any = profiler  # its functions are not typed, or not declared as exported
    if profiler.ProfilerActivity.CUDA not in public.supported_activities():
        raise CppmegaError(
            "package-missing",
            "This build of torch cannot profile CUDA (it lacks Kineto or CUPTI, or finds no GPU).",
            "The run would train, but produce no profile.",
            f"install torch from its own index, or {_DISABLE}",
        )


def write(export: Callable[[str], object], folder: Path, first_step: int, **facts: Any) -> Profile:
    """Write trace and summary of the profiled steps.

    Args:
        export: writes the trace into a file.
        folder: where both go.
        first_step: number of the first profiled step.
        facts: the profile's record of the run.

    Raises:
        CppmegaError: `write-failed`, `profile-without-kernels`.
    """
    raw = folder / "trace.json"
    try:
        export(str(raw))
        data = raw.read_bytes()
        trace = parse(data)
        _check(trace)
        profile = step_profile.profile_of(trace, first_step, **facts)
        durable.replace(folder / TRACE, gzip.compress(data, _COMPRESSION))
        json_file.write(folder / SUMMARY, json_file.plain(profile))
    except OSError as error:
        raise _not_written(folder, str(error.strerror)) from error
    except msgspec.DecodeError as error:  # torch only logs that it could not write everything
        raise _not_written(folder, f"the trace is incomplete ({error})") from error
    finally:
        with contextlib.suppress(OSError):
            raw.unlink()
    return profile


def _check(trace: Trace) -> None:
    if not trace.steps:
        raise msgspec.DecodeError("no step is in it")
    if not trace.work:
        raise CppmegaError(
            "profile-without-kernels",
            "The profiler recorded no kernel of the GPU.",
            "Another profiler has the GPU (nsys, ncu, DCGM), or the driver admits only root.",
            f"end the other profiler; or {_DISABLE}",
        )


def _versions() -> dict[str, str]:
    versions = {name: packages.version(name) for name in (*packages.NAMES, "cuda")}
    return {name: version for name, version in versions.items() if version is not None}


def _create(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(folder, str(error.strerror)) from error


def _not_written(folder: Path, why: str) -> CppmegaError:
    return CppmegaError(
        "write-failed",
        f"The profile cannot be written to {folder}: {why}.",
        "The profiled steps are over, and no record of them is left.",
        f"df -h {folder}; --profile-folder on a disk with room, or {_DISABLE}",
    )
