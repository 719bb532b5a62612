"""Calls of PyTorch's custom operators without the dispatcher.

A custom operator in Python passes through the dispatcher and several Python layers, which check
for aliases and mutations, in every call. What it computes, and its backward, are plain functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cppmega.ops.common.once_differentiable import once_differentiable


@cache
def direct(operator: Any) -> Callable[..., Any]:
    """What calls the functions of an operator themselves, with its backward.

    Where a call is traced, or an argument is a subclass of Tensor that the dispatcher has to know,
    the operator is called.

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
            return operator(*inputs)
        return Direct.apply(*inputs)  # type: ignore[no-untyped-call]

    return call


_PLAIN = (Tensor, torch.nn.Parameter)
