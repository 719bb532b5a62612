"""What kernels over rows of tokens require of the machine and of their tensors."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys

import torch

from cppmega.ops.common.device import gpu_obstacle

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The types of values that kernels over rows of tokens support."""


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels, as it does on a CPU."""
    triton = sys.modules.get("triton")
    knobs = getattr(triton, "knobs", None)
    if knobs is None:  # not imported, or before 3.4
        return triton is not None and _is_set("TRITON_INTERPRET")
    return bool(knobs.runtime.interpret)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def debugging() -> bool:
    """Whether the values of arguments are checked too: with Triton's own TRITON_DEBUG=1."""
    return _is_set("TRITON_DEBUG")


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed; it may never be imported."""
    return importlib.util.find_spec("triton") is not None


def kernel_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why kernels over rows of tokens do not support such values, as a clause; None if they do.

    On a CPU they run only in Triton's interpreter.
    """
    if dtype not in TYPES:
        return f"the values are {dtype}"
    if not has_triton():
        return "triton is not installed"
    import triton  # noqa: F401  # which `interpreted` asks

    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"the values are on {device.type}"
    return gpu_obstacle(device)
