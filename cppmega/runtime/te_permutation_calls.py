"""Calls of PyTorch's custom operators without the dispatcher.

In every call, a custom operator in Python passes through the dispatcher and several Python layers
that check for aliases and mutations. Its computation and its backward are plain functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cppmega.calls import passed, served
from cppmega.ops.common.once_differentiable import once_differentiable


@cache
def direct(operator: Any) -> Callable[..., Any]:
    """Return a function that calls an operator's forward and backward functions directly.

    It calls the operator itself while torch.compile traces, and if an argument is a subclass of
    Tensor, which the dispatcher must see.

    Args:
        operator: a `torch.library.CustomOpDef` with `register_autograd`, as
            `torch.library.custom_op` returns it.
    """

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            outputs = operator._init_fn(*inputs)
            operator._setup_context_fn(ctx, inputs, outputs)
            return outputs

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *gradients: Any) -> Any:
            return operator._backward_fn(ctx, *gradients)

    def call(*inputs: Any) -> Any:
        plain = all(type(x) in _PLAIN or not isinstance(x, Tensor) for x in inputs)
        if not plain or torch.compiler.is_compiling():
            passed(_PAGE, "a tensor is of a subclass, or the call is traced")
            return operator(*inputs)
        served(_PAGE)
        return Direct.apply(*inputs)

    return call


_PAGE = "te_permutation_calls"
_PLAIN = (Tensor, torch.nn.Parameter)
