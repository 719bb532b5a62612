"""The distributed optimizer's views and copies of parameters, for all parameters at once.

A rank of Megatron's distributed optimizer owns a contiguous part of every parameter's gradient and
of its place in the parameter buffer. Megatron slices these parts anew in each step, and copies each
updated part by a separate kernel: hundreds of calls, during which the GPU waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_PARTS = "_cppmega_parts"


def part(optimizer: Any, use: str, parameter: Tensor, buffer: Tensor, range_: Any) -> Tensor:
    """Return `buffer.view(-1)[range_.start : range_.end]`, cached while buffer and range persist.

    Args:
        optimizer: a `DistributedOptimizer`, which keeps the views.
        use: the purpose of the view; a parameter has one view per use.
        parameter: the model's; it lives as long as the optimizer.
        buffer: the tensor to slice.
        range_: a Megatron `Range` of elements.
    """
    parts: dict[tuple[str, int], _Part] = vars(optimizer).setdefault(_PARTS, {})
    key = (use, id(parameter))
    found = parts.get(key)
    if found is None or not found.is_of(buffer, range_):
        view = buffer.view(-1)[range_.start : range_.end]
        found = parts[key] = _Part(buffer, range_.start, range_.end, view)
    return found.view


@dataclass(frozen=True, slots=True)
class _Part:
    buffer: Tensor
    start: int
    end: int
    view: Tensor

    def is_of(self, buffer: Tensor, range_: Any) -> bool:
        return self.buffer is buffer and (self.start, self.end) == (range_.start, range_.end)


@dataclass(slots=True)
class Copies:
    """Copies that are collected, then run by one call for each pair of types."""

    _by_type: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = field(
        default_factory=dict
    )

    def add(self, target: Tensor, source: Tensor) -> None:
        """Collect `target.copy_(source)`; both have the same shape."""
        # PyTorch copies a list of tensors by few kernels only if they are of the same types.
        targets, sources = self._by_type.setdefault((target.dtype, source.dtype), ([], []))
        targets.append(target)
        sources.append(source)

    def make(self) -> None:
        """Run all collected copies."""
        with torch.no_grad():
            for targets, sources in self._by_type.values():
                torch._foreach_copy_(targets, sources)
