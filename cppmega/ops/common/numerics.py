"""The type in which the plain references, and what is left to torch, compute sums."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Convert to the type in which sums are computed: fp32, or fp64 for fp64."""
    return x if x.dtype == torch.float64 else x.float()
