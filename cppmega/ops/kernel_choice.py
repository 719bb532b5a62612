"""Whether one of cppmega's kernels computes a call of Megatron's, or Megatron's own code does."""

from __future__ import annotations

import importlib.util
import warnings

from torch import Tensor


def taken(what: str, tensor: Tensor, obstacle: str | None) -> bool:
    """Whether the kernel does: on a GPU, unless there is an obstacle, which is warned of.

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
