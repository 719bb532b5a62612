"""The bounds of our own scan of Mamba-3."""

from __future__ import annotations

from typing import Any

import torch

from cppmega.ops.mamba3_scan_autograd import mixed
from tests.ops.mamba3_checks import Shape
from tests.ops.mamba3_errors import errors


def check(shape: Shape, dtype: torch.dtype, *args: Any, **kwargs: Any) -> None:
    """Compare with plain torch; the arguments are those of `mamba3_errors.errors`.

    An error is at most 1.5 times that of plain torch whose matrix products are in the type of the
    inputs, or of one rounding to that type, which counts for gradients of few numbers. With inputs
    in fp32, which are rounded nowhere, it is at most 1e-5 of the result.
    """
    narrow = dtype != torch.float32
    found = errors(mixed, shape, dtype, *args, **kwargs, products=dtype if narrow else None)
    for name, error in found.items():
        floor = max(error.plain, error.size * torch.finfo(dtype).eps / 2)
        most = 1.5 * floor if narrow else 1e-5 * error.size
        assert error.ours <= most, f"{name} of {shape}, {dtype}: {error}, at most {most:.2e}"
