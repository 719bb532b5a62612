"""Profiles of made traces: overlapping streams, gaps across steps, and sums that are exact."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cppmega.runs.profile import OTHER, Profile
from cppmega.training import timeline
from cppmega.training.step_profile import profile_of
from cppmega.training.timeline import LAUNCHED, PYTHON
from cppmega.training.trace import Span, Trace, Work, parse
from tests.support.traces import MadeTrace

GEMM, ADD, NCCL = "nvjet_tst_128x256", "void at::native::elementwise_kernel<4>", "ncclDevKernel_X"


def profiled(made: MadeTrace) -> Profile:
    return profile_of(parse(made.data()), 11, recipe="r")


def kinds(profile: Profile) -> dict[str, tuple[float, float]]:
    return {one.kind: (round(one.ms * 1000, 6), one.launches) for one in profile.kinds}


def test_overlapping_streams_count_once() -> None:
    made = MadeTrace()
    made.steps(0, 100)
    made.kernel(GEMM, 10, 50)
    made.kernel(ADD, 30, 70, stream=8)
    made.kernel(NCCL, 0, 80, stream=9)
    found = profiled(made)
    assert (found.step_ms, found.busy_ms, found.waiting_ms) == (0.1, 0.08, 0.02)
    # Communication counts only where nothing else runs; of the others, the first one.
    assert kinds(found) == {
        "products": (40, 1),
        "elementwise": (20, 1),
        "communication": (20, 1),
    }
    assert {one.kind: one.summed_ms for one in found.kinds}["communication"] == 0.08
    assert found.waiting_share == 0.2 and sum(one.share for one in found.kinds) == 0.8


def test_a_gap_across_steps_is_one_gap_and_counts_in_both_steps() -> None:
    made = MadeTrace()
    made.steps(0, 100, 200)
    made.kernel(GEMM, 0, 80, launch=(0, 1))
    made.operator("aten::add", 85, 95)
    made.operator("aten::mul", 110, 130)
    made.kernel(ADD, 130, 200, launch=(118, 120))
    found = profiled(made)
    assert [(one.step, one.ms, one.busy_ms, one.launches) for one in found.steps] == [
        (11, 0.1, 0.08, 1),
        (12, 0.1, 0.07, 1),
    ]
    (gap,) = found.gaps
    assert (gap.step, gap.at_ms, gap.ms, gap.before, gap.after) == (11, 0.08, 0.05, GEMM, ADD)
    assert gap.host == {PYTHON: 0.02, "aten::add": 0.01, "aten::mul": 0.01, LAUNCHED: 0.01}
    assert {wait.host: wait.ms for wait in found.waits}[PYTHON] == 0.01  # a mean over two steps
    assert (found.step_ms, found.busy_ms, found.waiting_ms) == (0.1, 0.075, 0.025)


def test_what_is_between_two_steps_belongs_to_the_first() -> None:
    made = MadeTrace()
    made.event("user_annotation", "ProfilerStep#1", 0, 90)
    made.event("user_annotation", "ProfilerStep#2", 100, 150)
    made.kernel(GEMM, 92, 98)
    found = profiled(made)
    assert [one.ms for one in found.steps] == [0.1, 0.05]
    assert found.steps[0].launches == 1 and found.busy_ms == 0.003


def test_waits_of_the_host_are_counted_without_the_profilers_own() -> None:
    made = MadeTrace()
    made.steps(0, 100, 200)
    made.kernel(GEMM, 0, 80)
    made.event("cuda_runtime", "cudaStreamSynchronize", 30, 80)
    made.event("cuda_runtime", "cudaDeviceSynchronize", 190, 199)
    found = profiled(made)
    assert (found.synchronizations, found.synchronizing_ms) == (0.5, 0.025)


def test_nothing_unknown_is_hidden() -> None:
    made = MadeTrace()
    made.steps(0, 1000)
    for number in range(20):
        made.kernel(f"mystery_{number}", 10 * number, 10 * number + 5)
    (other,) = profiled(made).kinds
    assert other.kind == OTHER and len(other.kernels) == 20


def test_a_device_that_does_nothing_waits() -> None:
    trace = Trace("GPU", (Span(0, 50, "ProfilerStep#1"),), ())
    found = profile_of(trace, 1, recipe="r")
    assert (found.busy_ms, found.waiting_share, found.kinds) == (0, 1, ())


work = st.builds(
    lambda start, length, name, launched: Work(
        Span(start, start + length, name), 0, launched, ("aten::x",)
    ),
    st.integers(-50, 250),
    st.integers(0, 80),
    st.sampled_from([GEMM, ADD, NCCL, "mystery", "Memset (Device)"]),
    st.none() | st.integers(-60, 260),
)
ends = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(work, max_size=25), ends)
def test_busy_and_waiting_are_the_window_and_kinds_are_busy(
    all_work: list[Work], lengths: list[int]
) -> None:
    at, steps = 0, []
    for length in lengths:
        steps.append(Span(at, at + length, "ProfilerStep#1"))
        at += length
    host = {0: (Span(5, 20, "aten::a"), Span(30, 31, "aten::b"))}
    trace = Trace("GPU", tuple(steps), tuple(all_work), host)
    inside = [one for one in all_work if one.span.end > 0 and one.span.start < at]
    own = timeline.own_times(inside, 0, at, lambda one: one.span.name == NCCL)
    idle = list(timeline.gaps(inside, 0, at))
    union = {
        time for one in inside for time in range(max(one.span.start, 0), min(one.span.end, at))
    }
    assert sum(own) == len(union)
    assert sum(gap.end - gap.start for gap in idle) == at - len(union)
    assert all(0 <= time <= one.span.end - one.span.start
               for time, one in zip(own, inside, strict=True))  # fmt: skip
    for gap in idle:
        assert sum(timeline.explained(gap, trace).values()) == gap.end - gap.start
    found = profile_of(trace, 1, recipe="r")
    count = len(lengths)
    assert abs(found.busy_ms + found.waiting_ms - found.step_ms) < 1e-12
    assert abs(sum(one.ms for one in found.kinds) - found.busy_ms) < 1e-12
    assert abs(sum(one.share for one in found.kinds) + found.waiting_share - 1) < 1e-12
    assert abs(sum(wait.ms for wait in found.waits) - found.waiting_ms) < 1e-12
    assert abs(sum(one.launches for one in found.kinds) - found.launches) < 1e-9
    assert abs(sum(step.busy_ms for step in found.steps) / count - found.busy_ms) < 1e-12
    assert sum(step.launches for step in found.steps) == len(inside)
