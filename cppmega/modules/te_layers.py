"""Transformer Engine's layers in 16 bits, without what it prepares for every call.

Its linear layer collects some sixty settings, most of them for quantization, and its norm builds a
fuser of operations. Where nothing is quantized, the host spends most of such a layer's time there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cppmega.ops.grouped_linear import grouped_linear
from cppmega.ops.linear import linear as product
from cppmega.ops.once_differentiable import once_differentiable

_LINEAR = "transformer_engine.pytorch.module.linear"
_PRODUCTS = "transformer_engine.pytorch.cpp_extensions"
_PLAIN = "_cppmega_is_plain"


def linear(layer: Any, x: Tensor) -> Tensor | None:
    """The result of a linear layer, if one product computes it; None: it takes more than that.

    Args:
        layer: a Megatron `TELinear`.
        x: `[..., K]`.

    Returns:
        `[..., N]`, or None for another type than bf16 or fp16, for layers with a bias, tensor
        parallelism, quantization, offloading or delayed weight gradients, and on a CPU.
    """
    plain = vars(layer).get(_PLAIN)
    if plain is None:
        plain = vars(layer)[_PLAIN] = _is_plain(layer, [layer.weight])
    if not plain or not _computes_plainly(x, layer.weight):
        return None
    return product(x, layer.weight, layer.fuse_wgrad_accumulation)


def experts(layer: Any, x: Tensor, splits: Sequence[int]) -> Tensor | None:
    """The result of the linear layers of all experts, if one product computes it.

    Args:
        layer: a Megatron `TEGroupedLinear`.
        x: `[tokens, K]`, those of each expert together.
        splits: the number of tokens of each expert; a tensor of them stays on its device.

    Returns:
        `[tokens, N]`, or None for what `linear` does not compute either.
    """
    names = vars(layer).get(_PLAIN)
    if names is None:
        names = vars(layer)[_PLAIN] = _plain_experts(layer)
    if not names or not isinstance(splits, list) or x.dim() != 2:
        return None
    weights = [layer._parameters[name] for name in names]
    if not _computes_plainly(x, weights[0]):
        return None
    # As Transformer Engine does, which is told so by Megatron in the first micro-batch.
    first = not layer.disable_parameter_transpose_cache and layer.is_first_microbatch
    layer.is_first_microbatch = False
    products = sys.modules[_PRODUCTS].general_grouped_gemm
    fused = layer.fuse_wgrad_accumulation
    return grouped_linear(x, splits, weights, products, fused=fused, first=first)


def _plain_experts(layer: Any) -> tuple[str, ...]:
    """The names of the weights of all experts; empty: the layer is more than products of them."""
    # One tensor for all experts, or products for which their numbers of tokens stay on the GPU.
    others = ("single_grouped_weight", "use_grouped_tensor")
    names = tuple(f"weight{at}" for at in range(layer.num_gemms))
    weights = [layer._parameters.get(name) for name in names]
    if any(getattr(layer, other, False) for other in others) or not _is_plain(layer, weights):
        return ()
    return names


def _is_plain(layer: Any, weights: Sequence[Any]) -> bool:
    """Whether the layer is a product and nothing else, by what does not change after it is built.

    A weight that is quantized, or is gathered for each use, has a type of its own.
    """
    store = getattr(layer, "wgrad_store", None)
    return (
        all(type(weight) is torch.nn.Parameter for weight in weights)
        and not any(hasattr(weight, "__fsdp_param__") for weight in weights)
        and not layer.use_bias
        and layer.tp_size == 1
        and getattr(layer, "te_quant_params", None) is None
        and getattr(layer, "fsdp_group", None) is None
        and not (store is not None and store.delay_wgrad_compute())
        and not layer.config.cpu_offloading
    )


def _on_gpu(x: Tensor) -> bool:
    return type(x) is Tensor and x.is_cuda


def _computes_plainly(x: Tensor, weight: Tensor) -> bool:
    """Whether a call now is a product in 16 bits.

    That is, whether Transformer Engine neither quantizes, calibrates, offloads nor traces at
    present.
    """
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16) or not _on_gpu(x):
        return False
    te: Any = sys.modules[_LINEAR]
    state, debug = te.FP8GlobalStateManager, getattr(te, "TEDebugState", None)
    return not (
        state.is_fp8_enabled()
        or state.is_fp8_calibration()
        or te.is_cpu_offload_enabled()
        or (debug is not None and debug.debug_enabled)
        or torch.is_autocast_enabled(x.device.type)
        or torch.compiler.is_compiling()
    )


@cache
def norm(kind: type) -> type:
    """The same kind of norm, called without a fuser of operations.

    Args:
        kind: Transformer Engine's `RMSNorm`; one from before it had operations stays as it is.
    """
    if not hasattr(kind, "op_forward"):
        return kind

    def forward(self: Any, input: Tensor, *more: Any, **named: Any) -> Any:  # noqa: A002
        # The fuser initializes weights that have no values yet, and can be traced.
        if more or named or self.weight.is_meta or torch.compiler.is_compiling():
            return kind.forward(self, input, *more, **named)  # type: ignore[attr-defined]
        return _Operation.apply(input, self.weight, self)  # type: ignore[no-untyped-call]

    return type(kind)(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


class _Context:
    """What an operation of Transformer Engine saves, as its `OperationContext`."""

    def __init__(self, requires_grad: bool) -> None:
        self.requires_grad = requires_grad
        self.saved_tensors: tuple[Tensor, ...] = ()
        self.to_save: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.to_save = tensors


class _Operation(torch.autograd.Function):
    """One operation of Transformer Engine with one parameter, neither before nor after another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, operation: Any) -> Tensor:
        own = _Context(any(ctx.needs_input_grad))
        out: Tensor = operation.op_forward(own, x, None, None)
        ctx.save_for_backward(*own.to_save)
        own.to_save = ()
        ctx.own, ctx.operation = own, operation
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.own.saved_tensors = ctx.saved_tensors
        d_x, (d_weight,) = ctx.operation.op_backward(ctx.own, *gradients)
        return d_x, d_weight, None
