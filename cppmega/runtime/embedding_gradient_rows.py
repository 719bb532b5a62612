"""Which lookups of Megatron's embedding add the gradients of their rows to `main_grad`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cppmega.calls import passed, served
from cppmega.ops.common.main_grad import MainGrad
from cppmega.ops.pointwise import embedding


def lookup(layer: Any, weight: Tensor, ids: Tensor, masked: Tensor | None) -> Tensor | None:
    """The rows of an embedding, whose gradients are added to its `main_grad`; None if not here.

    Args:
        layer: a Megatron `VocabParallelEmbedding`.
        weight: `[V, D]`, its parameter, or what is gathered for this call.
        ids: integers `[b, s]`, from 0 to V - 1.
        masked: bool `[b, s]`: tokens of other tensor-parallel ranks; None: there are none.

    Returns:
        `[b, s, D]`, or None without gradients, on a CPU, without gradient accumulation fusion,
        where the parameter has no `main_grad` of Megatron's DDP, and while PyTorch traces.

    Raises:
        CallDeclinedError: the kernel does not support the types, or triton is not installed.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    found = MainGrad.of(weight) if type(weight) is torch.nn.Parameter else None
    if not layer.config.gradient_accumulation_fusion or found is None:
        passed("embedding_gradient_rows", "gradient accumulation is not fused, or FSDP manages it")
    elif not weight.is_cuda or torch.compiler.is_compiling():
        passed(
            "embedding_gradient_rows", "the embedding is not on a GPU, or PyTorch traces the call"
        )
    elif served(
        "embedding_gradient_rows", embedding.obstacle(found), weight=weight, main_grad=found.buffer
    ):
        return embedding.lookup(found, ids, masked)
    return None
