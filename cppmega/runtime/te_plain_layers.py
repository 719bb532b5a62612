"""Transformer Engine's layers in 16 bits, without the setup that it repeats in every call.

Its linear layer collects some sixty settings, most of them for quantization, and its norm builds a
fuser of operations. Where nothing is quantized, the host spends most of such a layer's time there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from cppmega.calls import passed, served
from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.common.weight_gradient import adds_in_one_product
from cppmega.ops.pointwise.grouped_linear import grouped_linear
from cppmega.ops.pointwise.linear import linear as product

_LINEAR = "transformer_engine.pytorch.module.linear"
_EXPERTS = "transformer_engine.pytorch.module.grouped_linear"
_PRODUCTS = "transformer_engine.pytorch.cpp_extensions"
_DECORATES = ("transformer_engine.pytorch.jit", "torch._dynamo")
"""Modules whose decorators wrap Transformer Engine's own functions."""
_PLAIN = "_cppmega_is_plain"
_PAGE = "te_plain_layers"
_MORE = "the layer does more than multiply, or its experts' counts stay on the GPU"
_NOW = "the call is not in 16 bits on a GPU, or it is quantized, autocast, offloaded or traced"
_SUM = "this PyTorch adds no weight gradient of this type in one product"
_REPLACED = "other code has replaced Transformer Engine's functions"


def linear(layer: Any, x: Tensor) -> Tensor | None:
    """The result of a linear layer if one product computes it; None if the layer does more.

    Args:
        layer: a Megatron `TELinear`.
        x: `[..., K]`.

    Returns:
        `[..., N]`, or None for another type than bf16 or fp16, for layers with a bias, tensor
        parallelism, quantization, offloading or delayed weight gradients, on a CPU, where this
        PyTorch cannot add the weight gradient in one product, and while Transformer Engine's
        functions are replaced, by which ModelOpt quantizes.
    """
    plain = vars(layer).get(_PLAIN)
    if plain is None:
        plain = vars(layer)[_PLAIN] = _is_plain(layer, [layer.weight])
    weight = layer.weight
    if not plain:
        return _left(_MORE)
    if not _computes_plainly(x, weight):
        return _left(_NOW)
    fused = layer.fuse_wgrad_accumulation
    if fused and not adds_in_one_product(weight, getattr(weight, "main_grad", weight)):
        return _left(_SUM)
    if not _calls_its_own(_LINEAR, "Linear", "general_gemm"):
        return _left(_REPLACED)
    served(_PAGE)
    return product(x, weight, fused)


def experts(layer: Any, x: Tensor, splits: Sequence[int]) -> Tensor | None:
    """The result of the linear layers of all experts, if one product computes it.

    Args:
        layer: a Megatron `TEGroupedLinear`.
        x: `[tokens, K]`, those of each expert together.
        splits: the number of tokens of each expert; a tensor of them stays on its device.

    Returns:
        `[tokens, N]`, or None for what `linear` does not compute either.
    """
    reason = experts_obstacle(layer, x) if isinstance(splits, list) else _MORE
    if reason is not None:
        return _left(reason)
    served(_PAGE)
    return products_of_experts(layer, x, splits)


def experts_obstacle(layer: Any, x: Tensor) -> str | None:
    """Why products alone do not compute the layers of all experts, as a clause; None if they do.

    Args:
        layer: a Megatron `TEGroupedLinear`.
        x: the tokens of all experts, or a tensor of their type and device, of two dimensions.
    """
    names = _names_of_weights(layer)
    if not names or x.dim() != 2:
        return _MORE
    if not _computes_plainly(x, layer._parameters[names[0]]):
        return _NOW
    if not _calls_its_own(_EXPERTS, "GroupedLinear", "general_grouped_gemm"):
        return _REPLACED
    return None


def products_of_experts(layer: Any, x: Tensor, splits: Sequence[int]) -> Tensor:
    """The result of the layers of all experts for a call that `experts_obstacle` does not name.

    Args:
        layer: a Megatron `TEGroupedLinear`.
        x: `[tokens, K]`.
        splits: the number of tokens of each expert, once or in several rounds.

    Returns:
        `[tokens, N]`.
    """
    weights = [layer._parameters[name] for name in _names_of_weights(layer)]
    # In the first micro-batch, which Megatron marks, gradients replace main_grad, as in
    # Transformer Engine.
    first = not layer.disable_parameter_transpose_cache and layer.is_first_microbatch
    layer.is_first_microbatch = False
    products = sys.modules[_PRODUCTS].general_grouped_gemm
    fused = layer.fuse_wgrad_accumulation
    return grouped_linear(x, splits, weights, products, fused=fused, first=first)


def _names_of_weights(layer: Any) -> tuple[str, ...]:
    """The names of the weights of all experts, of a layer that only multiplies; else none."""
    names: tuple[str, ...] | None = vars(layer).get(_PLAIN)
    if names is None:
        names = vars(layer)[_PLAIN] = _plain_experts(layer)
    return names


def _left(reason: str) -> Tensor | None:
    """Leave a call to Transformer Engine, whatever the run's arguments are."""
    passed(_PAGE, reason)
    return None


def _plain_experts(layer: Any) -> tuple[str, ...]:
    """The names of the weights of all experts; empty if the layer does more than multiply."""
    # One tensor for all experts, or products for which their numbers of tokens stay on the GPU.
    others = ("single_grouped_weight", "use_grouped_tensor")
    names = tuple(f"weight{at}" for at in range(layer.num_gemms))
    weights = [layer._parameters.get(name) for name in names]
    if any(getattr(layer, other, False) for other in others) or not _is_plain(layer, weights):
        return ()
    return names


def _is_plain(layer: Any, weights: Sequence[Any]) -> bool:
    """Whether the layer only multiplies, judged by attributes that are fixed when it is built.

    A weight that is quantized, or that is gathered for each use, is not a plain Parameter.
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
    """Whether a call at this moment is a single product in 16 bits.

    Transformer Engine must not be quantizing, calibrating, offloading or tracing.
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


def _calls_its_own(module: str, kind: str, product: str) -> bool:
    """Whether a layer of Transformer Engine would call its original functions, not replacements.

    Args:
        module: the module of the layer.
        kind: the name of its class; its autograd function has the same name after an underscore.
        product: the name of the function that multiplies.
    """
    loaded = [sys.modules.get(name) for name in (module, _PRODUCTS)]
    own, products = ({} if each is None else vars(each) for each in loaded)
    layer, function = own.get(kind), own.get(f"_{kind}")
    if layer is None or function is None:
        return True  # a release without this function has nothing to replace
    return (
        (function.__module__, function.__name__) == (layer.__module__, f"_{kind}")
        and "apply" not in vars(function)  # it is inherited from PyTorch
        and _defined_in(function, "forward")
        and _defined_in(function, "backward")
        and _defined_in(layer, "forward")
        and own.get(product) is products.get(product)
    )


def _defined_in(owner: type, name: str) -> bool:
    """Whether the code that a method runs is the one its class was defined with.

    A function's names do not show this, because `functools.wraps` copies them.
    """
    method: Any = getattr(owner, name)
    while getattr(method, "__globals__", {}).get("__name__", "").startswith(_DECORATES):
        method = method.__wrapped__
    code = getattr(method, "__code__", None)
    return (
        code is not None
        and code.co_qualname == f"{owner.__qualname__}.{name}"
        and method.__globals__["__name__"] == owner.__module__
    )


def norm(kind: type) -> Callable[..., Any]:
    """Build norms of a kind that are called without a fuser of operations.

    Their class stays the same, because ModelOpt selects layers to prune by class.

    Args:
        kind: Transformer Engine's `RMSNorm`; one of a release before operations is returned as is.
    """
    if not hasattr(kind, "op_forward"):
        return kind

    def build(*given: Any, **settings: Any) -> Any:
        built = kind(*given, **settings)
        built.forward = MethodType(_without_fuser(type(built).forward), built)
        return built

    return build


@cache
def _without_fuser(fused: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of a norm whose class has the given one, which builds a fuser."""

    def forward(self: Any, input: Tensor, *more: Any, **named: Any) -> Any:  # noqa: A002
        own = type(self).forward  # differs in a subclass, or if other code replaced it
        # The fuser initializes weights that have no values yet, and can be traced.
        known = own is fused and not (more or named or self.weight.is_meta)
        if not known or torch.compiler.is_compiling():
            return own(self, input, *more, **named)
        return _Operation.apply(input, self.weight, self)

    return forward


class _Context:
    """A minimal `OperationContext`: what an operation of Transformer Engine saves."""

    def __init__(self, requires_grad: bool) -> None:
        self.requires_grad = requires_grad
        self.saved_tensors: tuple[Tensor, ...] = ()
        self.to_save: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.to_save = tensors


class _Operation(torch.autograd.Function):
    """A single operation of Transformer Engine with one parameter, not fused with others."""

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
