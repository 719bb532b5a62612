"""Checks of the hyper-connections' kernels, for the interpreter and for a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cppmega.ops.mhc_reference import Parameters


class Shape(NamedTuple):
    """Sequence, batch, streams and width."""

    s: int
    b: int
    n: int
    c: int


class Given(NamedTuple):
    """What a site is given: the streams, its parameters, and the sub-layer's output and bias."""

    streams: Tensor
    parameters: Parameters
    out: Tensor
    bias: Tensor


def drawn(shape: Shape, dtype: torch.dtype, *, device: str = "cpu", std: float = 1.0) -> Given:
    """Streams of unequal sizes in `dtype`; parameters in fp32 (fp64) with logits of about `std`."""
    made = torch.Generator().manual_seed(7)
    s, b, n, c = shape
    full = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*sizes: int, dtype: torch.dtype = full, scale: Any = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=made) * scale).to(device, dtype)

    sizes = 0.5 + torch.rand(s, b, 1, 1, generator=made) * 3
    values = n * n + 2 * n
    parameters = Parameters(
        normal(values, n * c, scale=(n * c) ** -0.5),
        *(torch.full((1,), std * part, device=device, dtype=full) for part in (0.7, 0.9, 1.1)),
        normal(values, scale=0.3),
    )
    streams = normal(s, b, n, c, dtype=dtype, scale=sizes)
    out = normal(s, b, c, dtype=dtype)
    return Given(streams, parameters, out, normal(c, dtype=dtype))
