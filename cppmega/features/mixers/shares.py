"""The shares of parallel ranks in a dimension of a model, which need not be equal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor


def share(total: int, ranks: int, rank: int) -> slice:
    """The share of a rank in `total` items, of which the first ranks have one more."""
    each, more = divmod(total, ranks)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


@dataclass(frozen=True, slots=True)
class Runs:
    """The rows of one tensor-parallel rank among those of all, of a parameter in several parts."""

    total: int
    """The number of rows of all ranks."""
    own: tuple[slice, ...]
    """The rows of this rank, in the order in which its parameter holds them."""
    axis: int = 0

    @classmethod
    def of(cls, parts: Iterable[tuple[int, slice]], axis: int = 0) -> Runs:
        """Rows of parts that follow each other.

        Args:
            parts: the number of rows of each, and those of this rank.
            axis: the axis of the rows.
        """
        sizes, owned = zip(*parts, strict=True)
        starts = itertools.accumulate(sizes[:-1], initial=0)
        both = zip(starts, owned, strict=True)
        return cls(sum(sizes), tuple(slice(at + o.start, at + o.stop) for at, o in both), axis)

    @property
    def sizes(self) -> list[int]:
        """The number of this rank's rows in each part."""
        return [rows.stop - rows.start for rows in self.own]

    def select(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a tensor with those of all ranks."""
        parts = [tensor.narrow(self.axis, o.start, o.stop - o.start) for o in self.own]
        return torch.cat(parts, self.axis)

    def sharded(self, saved: ShardedTensor) -> ShardedTensorFactory:
        """The entry of this rank's rows in a distributed checkpoint.

        The checkpoint has the tensor of all ranks, under one key and as a single rank saves it.

        Args:
            saved: the entry that Megatron makes of the parameter.
        """
        without_data, axis = saved.without_data(), saved.prepend_axis_num + self.axis

        @torch.no_grad()
        def build(key: str, data: Tensor, replica: Any, flattened: Any) -> list[ShardedTensor]:
            assert flattened is None
            entries = []
            for rows, part in zip(self.own, data.split(self.sizes, self.axis), strict=True):
                shape, offset = list(saved.global_shape), list(saved.global_offset)
                shape[axis], offset[axis] = self.total, rows.start
                entries.append(
                    replace(
                        without_data,
                        key=key,
                        data=part,
                        dtype=part.dtype,
                        local_shape=tuple(part.shape),
                        global_shape=tuple(shape),
                        global_offset=tuple(offset),
                        axis_fragmentations=None,
                        replica_id=replica,
                    )
                )
            return entries

        def merge(parts: list[Tensor]) -> Tensor:
            return torch.cat(parts, self.axis)

        replica = (0, 0, saved.replica_id[-1])  # the parts of tensor-parallel ranks are no copies
        return ShardedTensorFactory(saved.key, saved.data, build, merge, replica)
