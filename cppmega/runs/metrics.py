"""metrics.jsonl: a header for every start of the ranks, then one object per logged step."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from cppmega.host import json_text
from cppmega.runs import json_file

_LAST = 2**16
"""Bytes at the end of the file that hold the last steps."""

T = TypeVar("T")


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The header that the ranks write when they start."""

    start: str
    """Name of the recipe."""
    overlay: str = ""
    data: str = ""
    """Fingerprint of the data as the ranks found it."""
    held_out: str = ""
    """That of the held-out data; empty where nothing is evaluated."""
    mock_data: bool = False
    load: str | None = None
    train_iters: int | None = None
    """The last step of the training; None: an earlier release wrote the header."""


class LoggedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One logged step."""

    step: Annotated[int, msgspec.Meta(ge=0)]
    seconds: float = 0.0
    tokens_per_second: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    losses: dict[str, float] = {}
    mock_data: bool = False
    profiled: bool = False
    """Slowed down by the profiler: not a throughput to quote."""
    peak_gib: float | None = None
    """Most GPU memory that the rank has allocated so far; None without a GPU."""
    graph_pool_gib: float | None = None
    """GPU memory that the rank's CUDA graphs keep reserved; None without graphs."""
    expert_load: tuple[tuple[float, float], ...] | None = None
    """By MoE layer of the rank, the fewest and the most tokens of an expert, relative to the mean;
    None without routers that count them."""
    tflops_per_gpu: float | None = None
    """With every layer counted; None in a loop of one's own."""
    tflops_per_gpu_by_megatron: float | None = None


class HeldOutLoss(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation on held-out data."""

    evaluated: Annotated[int, msgspec.Meta(ge=0)]
    """The step after which it was."""
    losses: dict[str, float]
    """Nats per token of the head (`lm loss`) and of each MTP depth (`mtp_1 loss`, ...)."""
    tokens: int
    seconds: float = 0.0
    mock_data: bool = False

    @property
    def loss(self) -> float | None:
        """That of the head."""
        return self.losses.get("lm loss")


def append(path: Path, record: Start | LoggedStep | HeldOutLoss) -> None:
    """Add a line to a metrics file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(json_file.plain(record)) + "\n")


def steps(path: Path) -> list[LoggedStep]:
    """Read the logged steps; a line that is damaged or still being written is skipped."""
    return _records(path, LoggedStep)


def evaluations(path: Path) -> list[HeldOutLoss]:
    """Read the held-out losses; of a repeated step, what was logged last."""
    return list({row.evaluated: row for row in _records(path, HeldOutLoss)}.values())


def starts(path: Path) -> list[Start]:
    """Read the headers."""
    return _records(path, Start)


def last_steps(path: Path) -> list[LoggedStep]:
    """Read the last logged steps, a hundred or more, without reading all of a long file."""
    return _records(path, LoggedStep, last=True)


def last_evaluation(path: Path) -> HeldOutLoss | None:
    """Read the last held-out losses, if a hundred steps or fewer were logged since."""
    return next(reversed(_records(path, HeldOutLoss, last=True)), None)


def first_start(path: Path) -> Start | None:
    """Read the first header, which is the first line."""
    return next(iter(_records(path, Start, first=True)), None)


def _records(path: Path, kind: type[T], *, first: bool = False, last: bool = False) -> list[T]:
    """The records of one kind: all, that of the first line, or those at the end of the file."""
    try:
        if not path.is_file():  # reading a pipe would block
            return []
        with path.open("rb") as file:
            if last:
                file.seek(max(0, path.stat().st_size - _LAST))
            data = file.readline(_LAST) if first else file.read()
    except OSError:
        return []
    lines = data.decode(errors="replace").split("\n")[:-1]
    return [row for line in lines if (row := _decode(line, kind)) is not None]


def _decode(line: str, kind: type[T]) -> T | None:
    with contextlib.suppress(ValueError):  # cut off when the disk was full
        return json_file.decode(json_text.loads(line), kind)
    return None


def last_written(path: Path) -> float:
    """When the file was last written, in seconds since the epoch; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
