"""Imported by a fork server: one device of gloo for all groups of a process.

Torch gives each group a device of its own, whose thread wakes a hundred times a second. Megatron
makes twenty groups for a layout, so that ranks which wait for each other kept a core busy. Under
torch 2.7, eight ranks with one device hung in 3 of 5 runs, and in 2 of 17 with their own.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo

_init = ProcessGroupGloo.__init__


@cache
def _device() -> ProcessGroupGloo.Device:
    """Made by the first group, after the fork: a thread does not survive one."""
    return ProcessGroupGloo.create_default_device()


def _with_one_device(
    self: ProcessGroupGloo, store: Any, rank: int, size: int, timeout: timedelta, **others: Any
) -> None:
    options = ProcessGroupGloo._Options()
    options._devices, options._timeout = [_device()], timeout
    for name, value in others.items():  # of torch 2.15: enable_reconfigure
        setattr(options, name, value)
    _init(self, store, rank, size, options)


if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8):
    ProcessGroupGloo.__init__ = _with_one_device  # type: ignore[method-assign]
