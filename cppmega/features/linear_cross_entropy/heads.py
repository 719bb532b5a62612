"""Select between `LinearCrossEntropyModule` and stock's path for the loss of Megatron's heads.

The patches of the GPT and hybrid heads and of the MTP loss call these functions, and only in runs
with `--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear`. A call that cannot use the
fused path is declined: it ends the run, or, if that was allowed, Megatron's own path computes it.

The three-GEMM form (see `cppmega.ops.linear_cross_entropy`) is used if the loss mask is known:
Megatron's loss functions multiply the loss by the mask that they also pass to `forward`, and by one
scalar; so does the MTP loss. If a loss function weights tokens in another way, the check of the op
fails and names the patch and the remedy: `CPPMEGA_LINEAR_CE_UPSTREAM=arbitrary`, which assumes
nothing about the gradient, at the price of a fourth GEMM.

Masked tokens are not computed if the mask carries the number of tokens that count, as
`counting_tokens` records it. A mask that was derived from another one on the way to the head does
not carry it, and every token is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from cppmega.calls import served
from cppmega.errors import CppmegaError
from cppmega.features.linear_cross_entropy.module import LinearCrossEntropyModule
from cppmega.host import env
from cppmega.ops.linear_cross_entropy import (
    Upstream,
    counted_tokens,
    say_once,
    select_backend,
)

UPSTREAM = env.LINEAR_CE_UPSTREAM.name
"""Variable: what is guaranteed about the gradient of the loss where the loss mask is known."""


def head_loss(
    model: Any,
    hidden: Tensor,
    weight: Tensor | None,
    runtime_gather_output: bool | None,
    labels: Tensor,
    loss_mask: Tensor | None,
    caller: str,
) -> Tensor | None:
    """Return the loss of a language model's main head, or None if Megatron's path must be used.

    Args:
        model: a `LanguageModule` with an output layer.
        hidden: `[s, b, H]`; `[s/tp, b, H]` with sequence parallelism.
        weight: tied weight, None for the layer's own.
        runtime_gather_output: as passed to `forward` of the model.
        labels: `[b, s]`.
        loss_mask: `[b, s]`, what the caller of `forward` multiplies the loss by; None promises
            nothing about the gradient, at the price of a fourth GEMM, which is logged.
        caller: the patch.

    Returns:
        `[b, s]`, fp32.
    """
    head = find_head(
        model.output_layer,
        weight,
        runtime_gather_output,
        model.compute_language_model_loss,
        getattr(model, "_scale_logits", None),
        caller,
    )
    return None if head is None else head(hidden, labels, loss_mask).loss


class AcceptedTokens(NamedTuple):
    """The loss of one MTP depth, and the counts for its acceptance rate.

    Attributes:
        loss: `[b, s]`, fp32.
        correct: the number of tokens that count and were predicted; None unless requested.
        total: the number of tokens that count; None unless requested.
    """

    loss: Tensor
    correct: Tensor | None
    total: Tensor | None


class Head(NamedTuple):
    """An output layer that can return the loss, with the arguments that all of its calls share."""

    layer: LinearCrossEntropyModule
    weight: Tensor | None
    logit_scale: float
    caller: str
    most_tokens: int | None
    """Upper bound of the tokens that count, for masks that do not carry their own."""

    def __call__(
        self, hidden: Tensor, labels: Tensor, loss_mask: Tensor | None, accepted: bool = False
    ) -> AcceptedTokens:
        """Compute the loss per token; shapes as for `head_loss`.

        Args:
            hidden: hidden states.
            labels: token ids.
            loss_mask: the factors of the loss; None if they are unknown.
            accepted: also count the predicted tokens, which requires a mask.
        """
        upstream = _promise(loss_mask, self.caller)
        promised = upstream == "weighted-scalar"
        out = self.layer(
            hidden,
            weight=self.weight,
            labels=labels,
            loss_weights=loss_mask if promised else None,
            upstream=upstream,
            counted_tokens=self._count(loss_mask) if promised else None,
            logit_scale=self.logit_scale,
            return_argmax=accepted,
            caller=self.caller,
        )
        if not accepted:
            return AcceptedTokens(out.loss, None, None)
        assert loss_mask is not None
        counts = loss_mask.bool()
        correct = ((out.argmax == labels) & counts).sum().float()
        return AcceptedTokens(out.loss, correct, counts.sum().float())

    def _count(self, loss_mask: Tensor | None) -> int | None:
        """Return how many tokens count at most; None in a CUDA graph, whose shapes are fixed."""
        if loss_mask is None or (loss_mask.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        own = counted_tokens(loss_mask)
        return self.most_tokens if own is None else own


def _promise(loss_mask: Tensor | None, caller: str) -> Upstream:
    """Return what is known about the gradient of the loss.

    Raises:
        CppmegaError: `linear-ce-upstream-unknown`, a misspelt `CPPMEGA_LINEAR_CE_UPSTREAM`.
    """
    asked = env.LINEAR_CE_UPSTREAM.read()
    if asked not in get_args(Upstream):
        raise CppmegaError(
            "linear-ce-upstream-unknown",
            f"{UPSTREAM}={asked} is not a known value.",
            "A misspelled value would have no effect, and the run would fail later.",
            f"set {UPSTREAM} to {' or '.join(get_args(Upstream))}",
        )
    if asked == "weighted-scalar" and loss_mask is not None:
        return "weighted-scalar"
    why = f"{UPSTREAM}={asked}" if asked == "arbitrary" else "forward() got no loss_mask"
    if torch.is_grad_enabled():
        say_once(f"{caller}: the backward computes the logits again (a fourth GEMM): {why}")
    return "arbitrary"


def find_head(
    layer: Any,
    weight: Tensor | None,
    runtime_gather_output: bool | None,
    compute_language_model_loss: Callable[..., Tensor],
    scale_logits: Callable[[Tensor], Tensor] | None,
    caller: str,
    *,
    rolled_mask: Tensor | None = None,
) -> Head | None:
    """Return the head for these arguments, or None if Megatron's path must be used.

    Args:
        layer: the model's output layer.
        weight: tied weight, None for the layer's own.
        runtime_gather_output: whether the logits must be gathered.
        compute_language_model_loss: the function that computes the loss from the logits.
        scale_logits: the function that scales the logits; None if there is none.
        caller: the patch.
        rolled_mask: the mask from which the masks of the calls are rolled. Rolling only drops
            tokens, so its number of tokens is an upper bound for them.

    Raises:
        CallDeclinedError: `call-declined`, unless Megatron's path is allowed.
    """
    obstacle = _obstacle(
        layer, weight, runtime_gather_output, compute_language_model_loss, scale_logits
    )
    if not served(caller, obstacle, weight=getattr(layer, "weight", None)):
        return None
    scales = scale_logits is not None and layer.config.use_mup
    scale = float(layer.config.mup_output_mult) if scales else 1.0
    most = None if rolled_mask is None else counted_tokens(rolled_mask)
    return Head(layer, weight, scale, caller, most)


def _obstacle(
    layer: Any,
    weight: Tensor | None,
    runtime_gather_output: bool | None,
    compute_language_model_loss: Callable[..., Tensor],
    scale_logits: Callable[[Tensor], Tensor] | None,
) -> str | None:
    if not isinstance(layer, LinearCrossEntropyModule):
        return f"the output layer is a {type(layer).__name__}"
    for hook in layer._forward_hooks.values():
        # --logits-load-dir and --logits-save-dir would mistake the loss for the logits.
        if getattr(hook, "__module__", "").startswith("megatron.training.distillation"):
            return f"{getattr(hook, '__qualname__', hook)} of distillation reads them"
    if _method(compute_language_model_loss) is not LanguageModule.compute_language_model_loss:
        # Distillation replaces it with its own, which needs the logits.
        return "the model has its own loss"
    stock_scale = getattr(LanguageModule, "_scale_logits", None)
    if scale_logits is not None and _method(scale_logits) is not stock_scale:
        return "the model scales its logits in its own way"
    used = layer.weight if weight is None else weight
    if used is not None and used.is_cuda and env.LINEAR_CE_KERNEL.read() == "auto":
        backend, why = select_backend(None, used.device, used.dtype)
        if backend == "reference":
            return why
    return layer.loss_obstacle(weight, runtime_gather_output)


def _method(function: Any) -> Any:
    return getattr(function, "__func__", function)
