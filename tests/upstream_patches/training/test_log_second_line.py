"""The lines of `training_log`, at the start of a run and after a resume."""

from __future__ import annotations

import re
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from cppmega.proof import stand_ins
from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "log_second_line"
FIRST = 100.0  # seconds of the first step of a process, which compiles; the others take one
WATT = 5.0


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_training_log(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.training import training as patched

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    unpatched = stock.module("megatron.training.training")
    every_line(patched, unpatched)
    the_window_of_a_first_step_that_ends_none(patched, unpatched)
    a_first_step_that_ends_its_window(patched, unpatched)
    a_first_step_without_an_update(patched, unpatched)


def every_line(patched: ModuleType, unpatched: ModuleType) -> None:
    """With interval 1, each line describes its step, at the start and after a resume at 20."""
    for start in (0, 20):
        lines = run(patched, 1, start, 3)
        assert [line.step for line in lines] == [start + 1, start + 2, start + 3]
        assert [line.loss for line in lines] == [start + 1, start + 2, start + 3]
        assert [line.seconds for line in lines] == [FIRST, 1, 1]
        assert [line.joule for line in lines] == [WATT * FIRST, WATT, WATT]
        # The timer of the backward runs for half of a step; at the line's end it starts anew.
        assert [line.timer for line in lines] == [FIRST / 2, 0.5, 0.5]
        stock = run(unpatched, 1, start, 3)
        assert [stock[0], stock[2]] == [lines[0], lines[2]]
        assert stock[1].loss == start + 1.5
        assert stock[1].seconds == (FIRST + 1) / 2
        assert stock[1].joule == WATT / 2
        assert stock[1].timer == (FIRST + 1) / 2


def the_window_of_a_first_step_that_ends_none(patched: ModuleType, unpatched: ModuleType) -> None:
    """The step belongs to the next line, as in stock."""
    for interval, start, steps, losses in (
        (3, 0, 6, {1: 1.0, 3: 2.0, 6: 5.0}),
        (10, 20, 20, {21: 21.0, 30: 25.5, 40: 35.5}),
        (10, 25, 15, {26: 26.0, 30: 28.0, 40: 35.5}),
    ):
        lines = run(patched, interval, start, steps)
        assert {line.step: line.loss for line in lines} == losses
        window = lines[1].step - start
        assert lines[1].seconds == pytest.approx((FIRST + window - 1) / window, abs=1e-4)
        assert lines[2].seconds == 1
        assert lines == run(unpatched, interval, start, steps)


def a_first_step_that_ends_its_window(patched: ModuleType, unpatched: ModuleType) -> None:
    """After a resume at 20 with interval 3, step 21 ends a line, and the next covers 22 to 24."""
    lines = run(patched, 3, 20, 7)
    assert [(line.step, line.loss, line.seconds) for line in lines] == [
        (21, 21, FIRST),
        (24, 23, 1),
        (27, 26, 1),
    ]
    assert lines[1].joule == WATT
    stock = run(unpatched, 3, 20, 7)
    assert [stock[0], stock[2]] == [lines[0], lines[2]]
    assert (stock[1].loss, stock[1].seconds) == (22.5, (FIRST + 3) / 4)


def a_first_step_without_an_update(patched: ModuleType, unpatched: ModuleType) -> None:
    """A step whose gradient overflowed counts only in its own line."""
    lines = run(patched, 1, 0, 3, overflow=1)
    assert [line.skipped for line in lines] == [1, 0, 0]
    assert [line.nan for line in lines] == [1, 0, 0]
    assert [line.loss for line in lines] == [None, 2, 3]
    assert [line.seconds for line in lines] == [FIRST, 1, 1]
    stock = run(unpatched, 1, 0, 3, overflow=1)
    assert [line.skipped for line in stock] == [1, 1, 0]
    assert [line.nan for line in stock] == [1, 1, 0]
    assert stock[1].seconds == (FIRST + 1) / 2


class Line(SimpleNamespace):
    """The values of a line: step, loss, seconds and joule per step, skipped, nan, and the timer's
    seconds per step."""

    def __init__(self, said: str, timer: float):
        def value(pattern: str) -> float | None:
            found = re.search(pattern + r" +([-+.\dE]+)", said)
            return float(found[1]) if found else None

        milliseconds = value(r"elapsed time per iteration \(ms\):")
        assert milliseconds is not None
        super().__init__(
            step=value("iteration"),
            loss=value("lm loss:"),
            seconds=milliseconds / 1000,
            joule=value(r"energy per GPU \(J/iter/GPU\):"),
            skipped=value("skipped iterations:"),
            nan=value("nan iterations:"),
            timer=timer,
        )


class Meter:
    """Energy since the last lap at a constant power."""

    def __init__(self, clock: SimpleNamespace):
        self.clock, self.last = clock, 0.0

    def lap(self) -> float:
        used, self.last = self.clock.now - self.last, self.clock.now
        return WATT * used


def run(
    module: ModuleType, interval: int, start: int, steps: int, overflow: int = -1
) -> list[Line]:
    """Return the lines of a process that loaded step `start`; the loss of a step is its number."""
    from megatron.core import timers as core_timers

    args = stand_ins.Arguments(
        0,
        log_interval=interval,
        log_energy=True,
        timing_log_level=1,
        micro_batch_size=1,
        data_parallel_size=1,
        gtp_weight_remat_size=1,
        world_size=1,
        num_experts=None,
        mtp_num_layers=None,
        log_memory_interval=None,
    )
    timers = core_timers.Timers(1, "max")
    clock = SimpleNamespace(now=0.0)
    meter = Meter(clock)
    lines: list[Line] = []

    def say(message: str) -> None:
        seen = timers("forward-backward").elapsed(reset=False)
        lines.append(Line(message, seen / interval))

    tensor = torch.tensor
    total: dict[str, Any] = {}
    with (
        stand_ins.quiet_training(
            module,
            args,
            get_timers=lambda: timers,
            get_energy_monitor=lambda: meter,
            num_floating_point_operations=lambda *_, **__: 1,
            print_rank_last=say,
        ),
        mock.patch.object(core_timers, "time", SimpleNamespace(time=lambda: clock.now)),
        mock.patch.object(torch, "tensor", lambda *a, **k: tensor(*a, **{**k, "device": None})),
    ):
        timers("interval-time", log_level=0).start()
        for step in range(start + 1, start + steps + 1):
            first = step == start + 1
            length = FIRST if first else 1.0
            clock.now += length / 2
            timers("forward-backward", log_level=1).start()
            clock.now += length / 2
            timers("forward-backward").stop()
            skipped = int(step == overflow)
            loss = float("inf") if skipped else float(step)
            module.training_log(
                {"lm loss": tensor([loss])},
                total,
                0.1,
                step,
                1.0,
                False,
                skipped,
                None,
                None,
                None,
                None,
                is_first_iteration=first,
            )
    return lines
