"""Layouts in memory of tensors, between numbers that no result may depend on."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

GUARD = 0 if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") else 4096
"""NaN before and after the elements of every layout, which a read out of bounds finds.

There are none where every tensor has an allocation of its own, beyond which memcheck reports reads.
"""


def guarded(x: Tensor, order: tuple[int, ...], step: int = 1, ones: int | None = None) -> Tensor:
    """The values of x in other memory.

    Args:
        x: any tensor.
        order: the dimensions, from the slowest to the fastest.
        step: the distance of neighbors in each dimension, in elements of that dimension.
        ones: the stride of dimensions of size 1; None: as usual.
    """
    strides, past = [0] * x.ndim, 1
    for d in reversed(order):
        strides[d], past = past * step, past * step * max(x.size(d), 1)
        if ones is not None and x.size(d) == 1:
            strides[d] = ones
    memory = torch.full((past + 2 * GUARD,), torch.nan, device=x.device).to(x.dtype)
    return memory.as_strided(x.shape, strides, GUARD).copy_(x)


def _plain(x: Tensor) -> tuple[int, ...]:
    return tuple(range(x.ndim))


def _columns(x: Tensor) -> Tensor:
    """The first columns of rows that go on with NaN."""
    others = torch.full(x.shape, torch.nan, device=x.device).to(x.dtype)
    return guarded(torch.cat((x, others), -1), _plain(x))[..., : x.size(-1)]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: guarded(x, (1, 0, *_plain(x)[2:])[-x.ndim :]),
    "reversed": lambda x: guarded(x, _plain(x)[::-1]),
    "sliced": lambda x: guarded(x, _plain(x), step=2),
    "columns": _columns,
    "ones far": lambda x: guarded(x, _plain(x), ones=1009),
}
EXPANDED: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded first": lambda x: guarded(x[:1], _plain(x)).expand(x.shape),
    "expanded second": lambda x: guarded(x[:, :1] if x.ndim > 1 else x, _plain(x)).expand(x.shape),
    "expanded last": lambda x: guarded(x[..., :1], _plain(x)).expand(x.shape),
}
"""As `LAYOUTS`, but with the values of the first element in place of the others."""
