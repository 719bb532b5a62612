"""The buffer to which Megatron's gradient accumulation fusion adds the gradient of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MainGrad:
    """Where Megatron's gradient accumulation fusion expects dW.

    Attributes:
        weight: the parameter.
        buffer: its `main_grad` at the time of the forward, of the same shape, in fp32 or the
            parameter's type.

    Source: megatron-core 0.19.2, tensor_parallel/layers.py,
    `LinearWithGradAccumulationAndAsyncCommunication.backward`.
    """

    weight: Tensor
    buffer: Tensor

    @staticmethod
    def of(weight: Tensor) -> MainGrad | None:
        """The buffer of a parameter; None: there is none, or Megatron-FSDP manages it.

        Megatron-FSDP overwrites the buffer instead of adding to it.
        """
        buffer = getattr(weight, "main_grad", None)
        if buffer is None or hasattr(weight, "__fsdp_param__"):
            return None
        return MainGrad(weight, buffer)

    def added(self) -> Tensor | None:
        """Tell Megatron that dW was added, and return the dummy gradient that its hooks require.

        Megatron's hooks discard it, unless `zero_out_wgrad` declares that another layer's gradient
        is added to it (shared embeddings); only then must it be zero.
        """
        weight: Any = self.weight
        weight.main_grad = self.buffer
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        allocate = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
        return allocate(self.buffer.shape, dtype=weight.dtype, device=weight.device)

    def added_in_pass(self) -> Tensor | None:
        """As `added`, with one dummy gradient per backward pass for all that call this.

        Autograd would add those of several lookups of an embedding, each as large as the table.
        """
        weight: Any = self.weight
        current = torch._C._current_graph_task_id()  # -1: not within a backward pass
        if current != -1 and getattr(weight, "_cppmega_added_in", None) == current:
            return None
        weight._cppmega_added_in = current
        return self.added()
