"""Whether one of cppmega's kernels computes a call, or other code does."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import warnings

from torch import Tensor


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
