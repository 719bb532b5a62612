"""The definition of an indexer call's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The definition of a call's loss.

    Attributes:
        softmax_scale: factor on the attention's products.
        coefficient: factor on the loss; with 0 no loss is computed.
        sparse: the loss is over the chosen keys instead of all valid ones.
        per_token: the sum over rows instead of their mean (`calculate_per_token_loss`).
        inside_logs: the definition up to 0.18, `log(t + 1e-10) - log(p + 1e-10)`. Its gradient
            vanished where p is below 1e-10; here it is p - t, that of 0.19, for both.
        tp_group: the group over which the attention's heads are split.
        repeatable: sum dk of the sparse loss in a fixed order; None follows torch's deterministic
            mode.
    """

    softmax_scale: float
    coefficient: float
    sparse: bool
    per_token: bool = False
    inside_logs: bool = False
    tp_group: dist.ProcessGroup | None = None
    repeatable: bool | None = None

    def ranks(self) -> int:
        """The number of ranks over which the attention's heads are split."""
        return 1 if self.tp_group is None else self.tp_group.size()

    def add_up(self, target: Tensor) -> Tensor:
        """Sum the target over the heads of all ranks, in place."""
        if self.ranks() > 1:
            dist.all_reduce(target, group=self.tp_group)
        return target

    def factor(self, rows: Tensor | None, like: Tensor) -> Tensor:
        """The factor on the sum over rows: one number, on the device of the rows."""
        if rows is None or self.per_token:
            count = 1 if self.per_token else max(like.numel(), 1)
            return like.new_full((), self.coefficient / count)
        return self.coefficient / rows.sum().clamp_min(1).to(like.dtype)
