"""What DSA's kernels require of a GPU and of tensors, and the GPU properties that select tiles."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST_SHARED = 99 * 1024
"""Shared memory that suffices for every kernel: that of a block on sm_86, sm_89 and sm_12x."""


class Gpu(NamedTuple):
    """The relevant differences between GPUs.

    Attributes:
        capability: compute capability, as in `sm_90`.
        shared: maximum shared memory per block, in bytes.
    """

    capability: tuple[int, int]
    shared: int


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a device; the interpreter, on a CPU, counts as an H100."""
    if device.type != "cuda":
        return Gpu((9, 0), 227 * 1024)
    found: Any = torch.cuda.get_device_properties(device)  # lacks the property on ROCm
    shared = getattr(found, "shared_memory_per_block_optin", 0)
    return Gpu((found.major, found.minor), shared)


def gpu_obstacle(device: torch.device) -> str | None:
    """Why the kernels do not fit a GPU, as a clause; None if they do."""
    gpu = gpu_of(device)
    if gpu.shared < LEAST_SHARED:
        major, minor = gpu.capability
        return f"sm_{major}{minor} gives a block {gpu.shared >> 10} KiB of shared memory, not 99"
    return None


def contiguous_rows(x: Tensor) -> Tensor:
    """The tensor with its last dimension contiguous, as the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()
