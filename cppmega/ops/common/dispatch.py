"""Whether one of cppmega's kernels computes a call, or other code does."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import warnings

import torch
from torch import Tensor

from cppmega.ops.common.device import gpu_obstacle

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The types of values that kernels over rows of tokens support."""


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels, as it does on a CPU."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


@functools.cache
def debugging() -> bool:
    """Whether the values of arguments are checked too: with Triton's own TRITON_DEBUG=1."""
    return os.environ.get("TRITON_DEBUG", "").lower() in ("1", "true", "on", "yes", "y")


def taken(what: str, tensor: Tensor, obstacle: str | None) -> bool:
    """Whether a kernel computes a call of Megatron's: on a GPU, if no obstacle is warned of.

    Args:
        what: the kernel, in the plural or with an article.
        tensor: one that it reads.
        obstacle: why it does not support the call, as half a sentence; None if it does.
    """
    if not tensor.is_cuda:
        return False
    if importlib.util.find_spec("triton") is None:
        obstacle = "triton is not installed"
    if obstacle is not None:
        # From the function of Megatron that asked, so that it is shown once for each.
        warnings.warn(f"cppmega does not use {what}: {obstacle}", stacklevel=3)
    return obstacle is None


def kernel_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why kernels over rows of tokens do not support such values, as a clause; None if they do.

    On a CPU they run only in Triton's interpreter.
    """
    if dtype not in TYPES:
        return f"the values are {dtype}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    import triton

    if device.type != "cuda" and not (device.type == "cpu" and triton.knobs.runtime.interpret):
        return f"the values are on {device.type}"
    return gpu_obstacle(device)
