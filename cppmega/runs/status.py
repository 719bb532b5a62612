"""status.json: the process in charge of one host's part of a run, and how that part ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cppmega.runs import json_file

Pid = Annotated[int, msgspec.Meta(ge=0)]
Rank = Annotated[int, msgspec.Meta(ge=0)]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The first failure on one host."""

    rank: Rank | None = None
    """None: torchrun, or the process in charge."""
    local_rank: Rank | UnsetType = UNSET
    exit: int | None
    """The exit status; negative if a signal ended the process."""
    signal: str = ""
    message: str
    others: tuple[int, ...] | UnsetType = UNSET
    """Ranks that failed after it."""

    def __post_init__(self) -> None:
        if self.rank is not None and self.local_rank is UNSET:
            raise ValueError("a rank failed, and its local rank is missing")


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The last state that the process in charge wrote. Only `host` is always present."""

    host: str
    boot: str = ""
    """Identifies the boot of the machine: process numbers mean nothing beyond it."""
    namespace: str | UnsetType = UNSET
    """Identifies the container whose process numbers these are."""
    pid: Pid = 0
    since: str = ""
    """When the process in charge was started."""
    started: float = 0.0
    agent: Pid | UnsetType = UNSET
    """The process of torchrun."""
    agent_since: str | UnsetType = UNSET
    workers: dict[str, str] = {}
    """Process number of each rank -> when it was started."""
    first_rank: Rank | UnsetType = UNSET
    """The lowest rank on this host."""
    stop: Literal["", "checkpoint", "now"] = ""
    """How it was asked to stop."""
    ended: float | None = None
    exit: int | None = None
    failure: Failure | UnsetType = UNSET
    note: str | UnsetType = UNSET
    profiled_steps: int | UnsetType = UNSET
    """How many steps the run was launched to profile: they are slower than others."""


def read(path: Path) -> Status | None:
    """Read a status; None before it was written, and if it is damaged."""
    raw = json_file.read_object(path)
    status = json_file.decode(raw, Status)
    if status is None and "failure" in raw:  # the rest still shows how the run ended
        rest = {name: value for name, value in raw.items() if name != "failure"}
        status = json_file.decode(rest, Status)
    return status
