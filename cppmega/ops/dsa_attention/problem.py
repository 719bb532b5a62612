"""The arguments of a call of DSA's absorbed sparse attention, and the results of its forward."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cppmega.ops.common.bounds import RowBounds
from cppmega.ops.common.device import Gpu, contiguous_rows, gpu_of


def is_wide(value: int, rotary: int) -> bool:
    """Whether latent keys with these numbers of value and rotary columns use the wide kernels."""
    return max(value, rotary) > 128


@dataclass(frozen=True)
class Absorbed:
    """The arguments of one call.

    Attributes:
        query: `[sq, b, heads, d]`.
        key: `[sk, b, 1, d]`, whose first columns are the value.
        value: the number of these columns.
        indices: `[b, sq, topk]`, contiguous integers; an entry that is not a key that its query may
            see adds nothing.
        softmax_scale: factor on the products.
        starts: first key that a query may see, `[sq]` or `[b, sq]`; None for both is causal.
        ends: the key after the last one that it may see.
    """

    query: Tensor
    key: Tensor
    value: int
    indices: Tensor
    softmax_scale: float
    starts: Tensor | None = None
    ends: Tensor | None = None

    def contiguous(self) -> Absorbed:
        """The same call with the memory layout that the kernels need."""
        return Absorbed(
            contiguous_rows(self.query),
            contiguous_rows(self.key),
            self.value,
            self.indices.contiguous(),
            self.softmax_scale,
            self.starts,
            self.ends,
        )

    @property
    def rotary(self) -> int:
        """The number of the key's columns that are not part of the value."""
        return self.key.size(3) - self.value

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.query.size(2)

    @property
    def is_wide(self) -> bool:
        """Whether the call uses the wide kernels."""
        return is_wide(self.value, self.rotary)

    @property
    def causal(self) -> bool:
        """Whether rows have no bounds of their own."""
        return self.starts is None or self.ends is None

    def gpu(self) -> Gpu:
        """The GPU of the call's tensors."""
        return gpu_of(self.query.device)

    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of batch elements, queries, keys, and chosen keys per row."""
        batch, sq, topk = self.indices.shape
        return batch, sq, self.key.size(0), topk

    def strides(self) -> tuple[int, ...]:
        """The strides of queries by row, batch and head, and of keys by row and batch."""
        return (*self.query.stride()[:3], *self.key.stride()[:2])

    @functools.cached_property
    def bounds(self) -> RowBounds:
        """The bounds of rows."""
        batch, sq, _ = self.indices.shape
        return RowBounds.of(self.starts, self.ends, batch, sq, self.indices)

    def common(self) -> dict[str, Any]:
        """The compile-time constants that all kernels share."""
        return {"HEADS": self.heads, "V": self.value, "R": self.rotary, "CAUSAL": self.causal}


class Attended(NamedTuple):
    """The results of the forward.

    Attributes:
        out: `[sq, b, heads, v]`.
        rest: the rounding error of `out`, in the same type; None if no gradient is needed.
        lse: log-sum-exp of each row in base 2, `[sq, b, heads]`; +inf for a row without keys.
    """

    out: Tensor
    rest: Tensor | None
    lse: Tensor

    @classmethod
    def empty(cls, call: Absorbed, *, want_rest: bool) -> Attended:
        """Allocate the results of a call."""
        batch, sq, _, _ = call.sizes()
        out = call.query.new_empty(sq, batch, call.heads, call.value)
        rest = out.new_empty(out.shape) if want_rest else None
        return cls(out, rest, out.new_empty(out.shape[:3], dtype=torch.float32))
