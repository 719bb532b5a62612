"""Traces as torch.profiler writes them, made of a few events. Times are in microseconds."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

MAIN, BACKWARD = 100, 200
"""Threads of the host."""


class MadeTrace:
    """A trace of a GPU: what is launched is numbered, as CUPTI does."""

    def __init__(self, device: str = "NVIDIA H200") -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1}]
        self.device = device

    def event(self, cat: str, name: str, start: float, end: float, **more: Any) -> None:
        """Any event."""
        row = {"ph": "X", "cat": cat, "name": name, "pid": 1, "ts": start, "dur": end - start}
        self.events.append({**row, "tid": MAIN, "args": {"External id": 1}, **more})

    def steps(self, *times: float) -> None:
        """Steps between consecutive times."""
        for number, (start, end) in enumerate(pairwise(times), 1):
            self.event("user_annotation", f"ProfilerStep#{number}", start, end)

    def operator(self, name: str, start: float, end: float, thread: int = MAIN) -> None:
        """An operator of the host."""
        self.event("cpu_op", name, start, end, tid=thread)

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        *,
        stream: int = 7,
        launch: tuple[float, float] | None = None,
        thread: int = MAIN,
        cat: str = "kernel",
    ) -> None:
        """A kernel, and the call that launched it."""
        number = len(self.events)
        arguments = {"correlation": number, "stream": stream, "device": 0}
        self.event(cat, name, start, end, tid=stream, args=arguments)
        if launch is not None:
            self.event(
                "cuda_runtime",
                "cudaLaunchKernel",
                *launch,
                tid=thread,
                args={"correlation": number},
            )

    def data(self) -> bytes:
        """The file's text."""
        devices = [{"id": 0, "name": self.device}] if self.device else []
        whole = {"schemaVersion": 1, "deviceProperties": devices, "traceEvents": self.events}
        return json.dumps(whole).encode()
