"""Layouts in memory of tensors `[s, b, ...]`, between numbers that no result may depend on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

GUARD = 4096
"""NaN before and after the elements of every layout, which a read out of bounds finds."""


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


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: guarded(x, (1, 0, *_plain(x)[2:])[-x.ndim :]),
    "reversed": lambda x: guarded(x, _plain(x)[::-1]),
    "sliced": lambda x: guarded(x, _plain(x), step=2),
    "columns": lambda x: guarded(torch.cat((x, x * torch.nan), -1), _plain(x))[..., : x.size(-1)],
    "ones far": lambda x: guarded(x, _plain(x), ones=1009),
}
EXPANDED: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded first": lambda x: guarded(x[:1], _plain(x)).expand(x.shape),
    "expanded second": lambda x: guarded(x[:, :1] if x.ndim > 1 else x, _plain(x)).expand(x.shape),
    "expanded last": lambda x: guarded(x[..., :1], _plain(x)).expand(x.shape),
}
"""As `LAYOUTS`, but with the values of the first element in place of the others."""
