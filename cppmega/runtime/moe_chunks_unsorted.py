"""Tokens of experts, left in the order in which ranks sent them.

A rank receives one chunk of tokens for each of its experts from every rank. Megatron sorts the
chunks by expert before the experts' products, and sorts the results back. Grouped products do not
need that: a product may have a group for every chunk. With a single rank nothing changes its place.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from cppmega.calls import passed, served
from cppmega.runtime import te_plain_layers

_PAGE = "moe_chunks_unsorted"
_EXPERTS = "megatron.core.transformer.moe.experts"
_EXTENSION = "megatron.core.extensions.transformer_engine"
_OTHER = "the experts are not those of TEGroupedMLP, or they do more than multiply"


def counts(dispatcher: Any, move: Any, record_stream: bool) -> None:
    """Copy the number of tokens of each chunk to the host, with the dispatcher's other numbers.

    Args:
        dispatcher: a `MoEAlltoAllTokenDispatcher`, after its `preprocess`.
        move: Megatron's `maybe_move_tensor_to_cpu`, which does not wait.
        record_stream: whether the copies are on another stream than the current one.
    """
    dispatcher.cppmega_counts = None
    if dispatcher.num_local_experts > 1 and _ranks(dispatcher) > 1:
        dispatcher.cppmega_counts = move(
            dispatcher.num_global_tokens_per_local_expert, record_stream=record_stream
        )


def decide(dispatcher: Any, experts: Any, tokens: Tensor) -> None:
    """Note whether the chunks of this call keep their order: for `keeps_order`.

    Args:
        dispatcher: the layer's, of any kind.
        experts: the layer's experts.
        tokens: `[tokens, hidden]`, as they arrived.
    """
    if getattr(dispatcher, "cppmega_counts", None) is None:
        return  # a dispatcher of another kind, or one that has nothing to sort
    reason = _obstacle(experts, tokens)
    dispatcher.cppmega_unsorted = reason is None
    if reason is None:
        served(_PAGE)
    else:
        passed(_PAGE, reason)


def keeps_order(dispatcher: Any) -> bool:
    """Whether the chunks are computed in the order in which they arrived."""
    if _ranks(dispatcher) == 1:
        served(_PAGE)
        return True
    return bool(getattr(dispatcher, "cppmega_unsorted", False))


def splits(dispatcher: Any, sorted_counts: Tensor) -> Tensor:
    """The tokens of each group of the experts' products.

    Args:
        dispatcher: the layer's.
        sorted_counts: `[experts]` on the host, of each expert of this rank.

    Returns:
        `[ranks * experts]` on the host if chunks keep their order, or `sorted_counts`.
    """
    if _ranks(dispatcher) == 1 or not keeps_order(dispatcher):
        return sorted_counts
    chunks: Tensor = dispatcher.cppmega_counts
    return chunks.reshape(-1)


def products(layer: Any, x: Tensor, groups: Any) -> Tensor | None:
    """The result of a `TEGroupedLinear` whose groups are chunks; None if they are its experts'."""
    if not isinstance(groups, list) or len(groups) == layer.num_gemms:
        return None
    return te_plain_layers.products_of_experts(layer, x, groups)


def _ranks(dispatcher: Any) -> int:
    """The ranks among which experts, or parts of one expert, are divided."""
    return int(dispatcher.tp_size * dispatcher.ep_size)


def _obstacle(experts: Any, tokens: Tensor) -> str | None:
    """Why products alone do not compute these experts, as a clause; None if they do."""
    modules = [sys.modules.get(name) for name in (_EXPERTS, _EXTENSION)]
    mlp, linear = (
        getattr(module, name, None)
        for module, name in zip(modules, ("TEGroupedMLP", "TEGroupedLinear"), strict=True)
    )
    layers = [getattr(experts, name, None) for name in ("linear_fc1", "linear_fc2")]
    if (
        type(experts) is not mlp
        or linear is None
        or not all(isinstance(layer, linear) for layer in layers)
        or getattr(experts, "_with_fused_impl", False)
        or experts.config.fp8
        or getattr(experts.config, "fp4", None)
    ):
        return _OTHER
    reasons = (te_plain_layers.experts_obstacle(layer, tokens) for layer in layers)
    return next((reason for reason in reasons if reason is not None), None)
