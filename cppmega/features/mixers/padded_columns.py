"""A column-parallel linear layer of an odd width, at the speed of a wider one."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron.core.tensor_parallel import mappings
from torch import Tensor

from cppmega.ops.pointwise.linear import padded_linear


@cache
def padded_columns(kind: type) -> type:
    """A subclass of a linear layer whose result has columns of zeros after its own.

    Weight, checkpoints and hooks are those of `kind`, which must be built without a bias, and whose
    product is in the type of the weight. With delayed weight gradients, which `kind` computes
    itself, nothing is padded. With sequence parallelism, the gathered input is kept for the
    backward.
    """

    def forward(self: Any, input_: Tensor) -> tuple[Tensor, None]:
        if self.config.delay_wgrad_compute:
            out, _ = kind.forward(self, input_)  # type: ignore[attr-defined]
            return out, None
        if self.config.sequence_parallel:
            input_ = mappings.gather_from_sequence_parallel_region(input_, group=self.tp_group)
        elif self.config.tensor_model_parallel_size > 1:
            input_ = mappings.copy_to_tensor_model_parallel_region(input_, self.tp_group)
        return padded_linear(input_, self.weight, self.config.gradient_accumulation_fusion), None

    return type(kind)(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
