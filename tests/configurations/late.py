"""Parameters that arrive late, as `--overlap-param-gather` lets them.

Megatron then gathers parameters while the forward pass runs, and waits for them in a hook of their
module's call. What is read before that, or without such a call, has the values of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def arrive_late(model: torch.nn.Module) -> None:
    """Let no parameter have its values until its module is called for the first time."""
    for module in model.modules():
        own = [(each, each.detach().clone()) for each in module.parameters(recurse=False)]
        if not own:
            continue
        for parameter, _ in own:
            parameter.detach().fill_(torch.nan)

        def arrive(called: torch.nn.Module, _: Any, own: Any = own) -> None:
            while own:
                parameter, values = own.pop()
                parameter.detach().copy_(values)

        module.register_forward_pre_hook(arrive)


def is_same_late(model: torch.nn.Module, outputs: Callable[[], Sequence[Tensor]]) -> bool:
    """Whether what a model computes is the same if its parameters arrive as modules are called."""
    before = outputs()
    arrive_late(model)
    return all(map(torch.equal, outputs(), before))
