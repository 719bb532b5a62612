"""Traces of torch.profiler, read: what launched a kernel, what the host was in, what CPU ran."""

from __future__ import annotations

import msgspec
import pytest

from cppmega.training.trace import Span, parse
from tests.support.traces import BACKWARD, MAIN, MadeTrace


def made() -> MadeTrace:
    trace = MadeTrace()
    trace.steps(0, 100, 200)
    trace.operator("aten::linear", 10, 40)
    trace.operator("aten::addmm", 15, 35)
    node = "autograd::engine::evaluate_function: AddmmBackward0"
    trace.operator(node, 50, 90, BACKWARD)
    trace.operator("AddmmBackward0", 52, 88, BACKWARD)
    trace.kernel("nvjet_tst", 30, 60, launch=(20, 22))
    trace.kernel("nvjet_back", 60, 90.5, launch=(60, 61), thread=BACKWARD, stream=9)
    trace.kernel("Memcpy DtoH (Device -> Pinned)", 91, 92, cat="gpu_memcpy")
    trace.event("cuda_runtime", "cudaStreamSynchronize", 32, 34)
    trace.event("gpu_user_annotation", "ProfilerStep#1", 0, 100)
    return trace


def test_a_kernel_knows_the_operators_around_its_launch() -> None:
    trace = parse(made().data())
    assert (trace.device, trace.thread) == ("NVIDIA H200", MAIN)
    assert [span.name for span in trace.steps] == ["ProfilerStep#1", "ProfilerStep#2"]
    by_name = {work.span.name: work for work in trace.work}
    assert by_name["nvjet_tst"].inside == ("ProfilerStep#1", "aten::linear", "aten::addmm")
    assert by_name["nvjet_tst"].launched == 22_000
    assert by_name["nvjet_back"].inside[-1] == "AddmmBackward0"
    assert by_name["nvjet_back"].thread == BACKWARD
    assert by_name["nvjet_back"].span == Span(60_000, 90_500, "nvjet_back")
    assert by_name["Memcpy DtoH (Device -> Pinned)"].launched is None


def test_the_host_is_in_one_thing_at_a_time() -> None:
    host = parse(made().data()).host
    assert host[MAIN] == (
        Span(10_000, 32_000, "aten::linear"),
        Span(32_000, 34_000, "cudaStreamSynchronize"),
        Span(34_000, 40_000, "aten::linear"),
    )
    assert host[BACKWARD] == (Span(52_000, 88_000, "AddmmBackward0"),)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", made().data()[:-200]])
def test_what_is_no_trace_or_cut_off(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        parse(data)
