"""Split a projection by columns; the gradients of the parts are joined at the speed of memory.

Parts are often read in another order of sequence and batch than the projection has. Their gradients
then arrive as transposed views, which `torch.cat` joins element by element, at less than a third of
an H200's bandwidth. Here each part's gradient is copied once, in whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.dispatch import interpreted
from cppmega.ops.common.once_differentiable import once_differentiable


def split_columns(projected: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """`projected.split(widths, -1)`.

    Args:
        projected: `[s, b, sum(widths)]`.
        widths: columns of each part.

    Returns:
        Views of `projected`, `[s, b, width]` each.

    Raises:
        ValueError: the widths do not add up to the columns.
    """
    if projected.dim() != 3 or projected.size(-1) != sum(widths):
        raise ValueError(f"{list(widths)} columns of {list(projected.shape)}")
    parts: tuple[Tensor, ...] = _Split.apply(projected, tuple(widths))
    return parts


def _by_kernel(tensor: Tensor) -> bool:
    return interpreted() if tensor.device.type == "cpu" else tensor.is_cuda


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.widths = widths
        return tuple(torch.split(projected, list(widths), -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first = gradients[0]
        if not _by_kernel(first):
            return torch.cat(gradients, -1), None
        from cppmega.ops.pointwise import split_columns_triton as kernels

        joined = first.new_empty(*first.shape[:-1], sum(ctx.widths))
        for gradient, own in zip(gradients, torch.split(joined, list(ctx.widths), -1), strict=True):
            kernels.copy(gradient if gradient.stride(-1) == 1 else gradient.contiguous(), own)
        return joined, None
