"""Complete sequences for recurrences whose sequence is split over context-parallel ranks.

Megatron cuts every sequence, or every document of a pack, into twice as many pieces as there are
ranks; a rank has one piece from the front and the corresponding one from the back, so that causal
attention costs all of them the same. A recurrence cannot begin in the middle: ranks exchange the
tokens of all channels for all tokens of their share of the channels, and exchange the results back.
Gradients return along the same way; those of channels that several ranks receive are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.balanced_order import balanced_order


@dataclass(frozen=True, slots=True)
class Exchange:
    """The exchange of one layer's tokens among context-parallel ranks."""

    group: Any
    order: Tensor
    """The places in the sequence of the tokens of rank 0, then of rank 1, and so on."""

    @classmethod
    def of(cls, group: Any, length: int, bounds: Tensor | None, device: torch.device) -> Exchange:
        """Prepare the exchange of a sequence.

        Args:
            group: the context-parallel ranks.
            length: the tokens of each rank.
            bounds: as for `balanced_order`.
            device: where the tokens are.
        """
        return cls(group, balanced_order(bounds, length, group.size(), device))

    def sequence(self, pieces: Sequence[Tensor]) -> Tensor:
        """The complete sequence of this rank's channels.

        Args:
            pieces: for each rank, the channels `[s / ranks, b, own]` that it computes.

        Returns:
            `[s, b, own]`.
        """
        s, b, width = pieces[self.group.rank()].shape
        received = _exchanged(self.group, pieces, [(s, b, width)] * len(pieces))
        return _Permuted.apply(torch.cat(received), self.order.argsort(), self.order)  # type: ignore[no-any-return]

    def pieces(self, sequence: Tensor, widths: Sequence[int]) -> Tensor:
        """This rank's tokens of all channels.

        Args:
            sequence: `[s, b, own]`, as the ranks have computed it.
            widths: the number of channels of each rank.

        Returns:
            `[s / ranks, b, sum(widths)]`.
        """
        ordered = _Permuted.apply(sequence, self.order, self.order.argsort())
        pieces = ordered.chunk(len(widths))
        s, b, _ = pieces[0].shape
        return torch.cat(_exchanged(self.group, pieces, [(s, b, w) for w in widths]), -1)


def _exchanged(
    group: Any, sent: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """Send a tensor to every rank, and receive one of the given shape from each."""
    flat = torch.cat([piece.flatten() for piece in sent])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = _AllToAll.apply(flat, group, sizes, [piece.numel() for piece in sent])
    return [part.view(s) for part, s in zip(received.split(sizes), shapes, strict=True)]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, group: Any, to: list[int], sent: list[int]) -> Tensor:
        ctx.group, ctx.to, ctx.sent = group, to, sent
        received = flat.new_empty(sum(to))
        torch.distributed.all_to_all_single(received, flat.contiguous(), to, sent, group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return _AllToAll.apply(gradient, ctx.group, ctx.sent, ctx.to), None, None, None


class _Permuted(torch.autograd.Function):
    """Rows in another order; the gradient is not added row by row, as indexing would."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        order, back = ctx.saved_tensors
        return _Permuted.apply(gradients[0], back, order), None, None
