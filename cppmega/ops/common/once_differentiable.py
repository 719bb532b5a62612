"""Backward passes that cannot be differentiated, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Raise an error where the gradients of an `autograd.Function` are differentiated.

    torch's decorator of this name does so only if an incoming gradient requires grad. That of a
    loss that is linear in the outputs does not, and the part of a second derivative that passes
    through the inputs would be missing silently. Here the gradients depend on the inputs. A
    backward pass with `create_graph=True` is allowed as long as nothing differentiates them.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return found
        several = found if isinstance(found, tuple) else (found,)
        tensors = [x for x in several if x is not None]
        reached = [*gradients, *ctx.saved_tensors]
        reached = [x for x in reached if isinstance(x, Tensor) and x.requires_grad]
        covered = {get_gradient_edge(x)[:2] for x in reached}
        others = {edge[0] for edge in ctx.next_functions if edge not in covered}
        refused = iter(
            _Refused.apply(
                backward.__qualname__, len(tensors), *tensors, *reached, *_leaves(others)
            )
        )
        result = tuple(None if x is None else next(refused) for x in several)
        return result if isinstance(found, tuple) else result[0]

    return once


class _Refused(torch.autograd.Function):
    """The identity for the first `count` tensors, whose gradient is an error."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{ctx.name} has no derivative: cppmega's kernels support first derivatives only. "
            "Compute second derivatives, as in a gradient penalty, with the plain torch version."
        )


def _leaves(nodes: Iterable[Any]) -> list[Tensor]:
    """The leaf tensors that nodes of an autograd graph lead to."""
    seen, waiting, leaves = set(), [node for node in nodes if node is not None], []
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            leaves += [] if leaf is None else [leaf]
            waiting += [following for following, _ in node.next_functions if following is not None]
    return leaves
