"""When Megatron's heads take the loss from `LinearCrossEntropyModule`, and when stock's path.

The patches of the GPT and hybrid heads and of the MTP loss call in here, and only in runs with
`--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear`. Whatever keeps such a run from the
fused path is said once, with its reason; Megatron's own path is taken then.

The promise of three GEMMs (see `cppmega.ops.linear_cross_entropy`) is made where the loss mask is
known: Megatron's loss functions multiply the loss by the mask that they also hand to `forward`, and
by one scalar; so does the MTP loss. A loss function that weighs tokens in another way breaks the
promise, and the check of the op names the patch. It must not hand its mask to `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from cppmega.modules.linear_cross_entropy import LinearCrossEntropyModule
from cppmega.ops.linear_cross_entropy import say_once


def head_loss(
    model: Any,
    hidden: Tensor,
    weight: Tensor | None,
    runtime_gather_output: bool | None,
    labels: Tensor,
    loss_mask: Tensor | None,
    caller: str,
) -> Tensor | None:
    """Loss of a language model's main head, or None where Megatron's path must be taken.

    Args:
        model: a `LanguageModule` with an output layer.
        hidden: `[s, b, H]`; `[s/tp, b, H]` with sequence parallelism.
        weight: tied weight, None for the layer's own.
        runtime_gather_output: as `forward` of the model got it.
        labels: `[b, s]`.
        loss_mask: `[b, s]`, what the caller of `forward` multiplies the loss by; None promises
            nothing about the gradient, at the price of a fourth GEMM.
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
    """The loss of one MTP depth, and what its acceptance rate is computed from.

    Attributes:
        loss: `[b, s]`, fp32.
        correct: how many tokens that count were predicted; None unless asked for.
        total: how many tokens count; None unless asked for.
    """

    loss: Tensor
    correct: Tensor | None
    total: Tensor | None


class Head(NamedTuple):
    """An output layer that can end in the loss, with what every call of it shares."""

    layer: LinearCrossEntropyModule
    weight: Tensor | None
    logit_scale: float
    caller: str

    def __call__(
        self, hidden: Tensor, labels: Tensor, loss_mask: Tensor | None, accepted: bool = False
    ) -> AcceptedTokens:
        """Loss per token; shapes as for `head_loss`.

        Args:
            hidden: hidden states.
            labels: token ids.
            loss_mask: the promise about the gradient; None for none.
            accepted: count the predicted tokens too, which needs a mask.
        """
        out = self.layer(
            hidden,
            weight=self.weight,
            labels=labels,
            loss_weights=loss_mask,
            upstream="arbitrary" if loss_mask is None else "weighted-scalar",
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


def find_head(
    layer: Any,
    weight: Tensor | None,
    runtime_gather_output: bool | None,
    compute_language_model_loss: Callable[..., Tensor],
    scale_logits: Callable[[Tensor], Tensor] | None,
    caller: str,
) -> Head | None:
    """The head of these arguments, or None where Megatron's path must be taken.

    Args:
        layer: the model's output layer.
        weight: tied weight, None for the layer's own.
        runtime_gather_output: whether the logits are to be gathered.
        compute_language_model_loss: what would compute the loss from the logits.
        scale_logits: what would scale the logits, None for nothing.
        caller: the patch.
    """
    obstacle = _obstacle(
        layer, weight, runtime_gather_output, compute_language_model_loss, scale_logits
    )
    if obstacle:
        say_once(f"{caller}: the logits are computed, because {obstacle}")
        return None
    scales = scale_logits is not None and layer.config.use_mup
    scale = float(layer.config.mup_output_mult) if scales else 1.0
    return Head(layer, weight, scale, caller)


def _obstacle(
    layer: Any,
    weight: Tensor | None,
    runtime_gather_output: bool | None,
    compute_language_model_loss: Callable[..., Tensor],
    scale_logits: Callable[[Tensor], Tensor] | None,
) -> str | None:
    if not isinstance(layer, LinearCrossEntropyModule):
        return f"the output layer is a {type(layer).__name__}"
    if _method(compute_language_model_loss) is not LanguageModule.compute_language_model_loss:
        # Distillation puts its own in its place, and wants the logits.
        return "the model has a loss of its own"
    stock_scale = getattr(LanguageModule, "_scale_logits", None)
    if scale_logits is not None and _method(scale_logits) is not stock_scale:
        return "the model scales its logits in a way of its own"
    return layer.loss_obstacle(weight, runtime_gather_output)


def _method(function: Any) -> Any:
    return getattr(function, "__func__", function)
