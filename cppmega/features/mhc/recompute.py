"""Selective recomputation of hyper-connections (`mhc` among the recompute modules).

A block of layers keeps the streams at its start and, for every site, its weights and the output of
its sub-layer. (The first streams of a model are copies of one tensor, which is kept instead.) The
streams in between, and the inputs of the sub-layers, are recomputed from those in the backward
pass, and released as it proceeds. To this end, the tensors that autograd saves inside a site pass
through a hook that replaces a recomputable tensor with a `Recomputed`; all others are saved
unchanged. It repeats the exact operations of the forward, so results do not depend on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.sizes.megatron_args import recomputes


class Recomputed:
    """A tensor that is computed when first needed, and then kept as long as this object."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make: Callable[[], Tensor] | None = make
        self._value: Tensor | None = None

    def value(self) -> Tensor:
        """The tensor."""
        if self._value is None:
            assert self._make is not None
            with torch.no_grad():
                self._value = self._make()
            self._make = None  # releases the tensors that it was computed from, too
        return self._value


class _View(NamedTuple):
    """A view of a recomputed tensor."""

    base: Recomputed
    size: Sequence[int]
    stride: Sequence[int]
    offset: Any


class _Known(NamedTuple):
    """A storage that the forward has filled, and how to recompute its contents."""

    storage: StorageWeakRef
    """While it is held, no other storage can have its address."""
    dtype: torch.dtype
    recomputed: Recomputed


class Block:
    """Layers whose streams are recomputed together, in one forward pass."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def know(self, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        """Register how to recompute a tensor of the forward, which must fill its storage."""
        storage = StorageWeakRef(tensor.untyped_storage())
        self._known[storage.cdata] = _Known(storage, tensor.dtype, Recomputed(make))

    def recomputed(self, tensor: Tensor) -> Recomputed:
        """How to obtain a tensor in the backward; a tensor that is not known is kept."""
        kept = tensor.detach()
        return self._find(tensor) or Recomputed(lambda: kept)

    def close(self) -> None:
        """End the forward; from here on only autograd's saved tensors keep a `Recomputed` alive."""
        self._known.clear()

    def _find(self, tensor: Tensor) -> Recomputed | None:
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known.recomputed if known is not None and known.dtype == tensor.dtype else None

    def hooks(self) -> saved_tensors_hooks:
        """A context in which autograd saves known tensors as recomputed ones."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        base = self._find(tensor)
        if base is None:
            return tensor
        return _View(base, tensor.size(), tensor.stride(), tensor.storage_offset())


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    return packed.base.value().as_strided(packed.size, packed.stride, packed.offset)


class _Again(torch.autograd.Function):
    """Save only the inputs of a function, no intermediate results."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Any], repeated: Callable[..., Any], *inputs: Any
    ) -> Any:
        ctx.function = repeated
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.function(*inputs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        wanted = [t for t in inputs if t is not None]
        found = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))
        return (None, None, *(None if t is None else next(found) for t in inputs))


def again(
    function: Callable[..., Any],
    *inputs: Tensor | None,
    repeated: Callable[..., Any] | None = None,
) -> Any:
    """Call a function of tensors; the backward pass recomputes its intermediate results.

    Args:
        function: what to call now.
        inputs: its arguments.
        repeated: what to call in the backward pass instead.
    """
    return _Again.apply(function, repeated or function, *inputs)


def with_these_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that repeatedly draws the random numbers that would be drawn now."""
    from megatron.core.tensor_parallel import random

    states = random._get_all_rng_states()

    def repeated(*inputs: Any) -> Any:
        with random._fork_rng():
            random._set_all_rng_states(*states)
            return function(*inputs)

    return repeated


def begin(sites: Sequence[Sequence[Any]], config: Any, training: bool) -> None:
    """Assign blocks to the sites of a stack's layers for one forward pass, or remove them.

    Args:
        sites: the hyper-connections of each layer, in order.
        config: Megatron's TransformerConfig.
        training: whether there will be a backward pass.
    """
    asked = training and torch.is_grad_enabled() and recomputes(config, "mhc")
    together = config.mhc_recompute_layer_num or len(sites)
    block = None
    for number, of_layer in enumerate(sites):
        if asked and number % together == 0:
            block = Block()
        for site in of_layer:
            site.block = block


def end(sites: Iterable[Any]) -> None:
    """Close the blocks of a forward pass, so that no value outlives its use in the backward."""
    for site in sites:
        if site.block is not None:
            site.block.close()
            site.block = None


def scope(site: Any) -> contextlib.AbstractContextManager[Any]:
    """Context of a sub-layer's call: autograd does not save what its block recomputes."""
    return around(None if site is None else site.block)


def around(block: Block | None) -> contextlib.AbstractContextManager[Any]:
    """Context in which autograd does not save what a block, if any, recomputes."""
    return contextlib.nullcontext() if block is None else block.hooks()
