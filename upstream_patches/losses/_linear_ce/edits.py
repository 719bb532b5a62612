"""The two edits that the GPT head and the hybrid head share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cppmega.edits import in_order, inserting, replacing

if TYPE_CHECKING:
    from cppmega.edits import NodeEdit

_CHOICE = """
# A ColumnParallelLinear that can also end in the loss, so that the logits never exist.
output_layer_class = {stock}
if config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == 'linear':
    from cppmega.features.linear_cross_entropy import module as fused

    output_layer_class = fused.LinearCrossEntropyModule
"""

LOGITS = """
logits, _ = self.output_layer(
    hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output
)
"""

_LOSS = """
# Nobody but the loss wants the logits here: take it from the hidden states.
if (
    labels is not None
    and not in_inference_mode{unless}
    and self.config.cross_entropy_loss_fusion
    and self.config.cross_entropy_fusion_impl == 'linear'
):
    from cppmega.features.linear_cross_entropy.heads import head_loss

    loss = head_loss(
        self,
        hidden_states,
        output_weight,
        runtime_gather_output,
        labels,
        {loss_mask},
        '{page}',
    )
    if loss is not None:
        return loss
"""


def choosing_output_layer(stock: str = "tensor_parallel.ColumnParallelLinear") -> NodeEdit:
    """Return an edit of a model's `__init__`: the configuration selects its output layer.

    Args:
        stock: the class that the model has otherwise.
    """
    return in_order(
        replacing(stock, "output_layer_class"),
        inserting(
            _CHOICE.format(stock=stock),
            after="super().__init__(config=config, pg_collection=pg_collection)",
        ),
    )


def returning_loss(
    page: str, *, unless: str = "", loss_mask: str = "loss_mask", before: str = LOGITS
) -> NodeEdit:
    """Return an edit of a model's forward pass: it returns the loss before it computes logits.

    Args:
        page: the page that is named if the gradient is not what the head relies on.
        unless: an expression that is true if something else needs the logits.
        loss_mask: the expression by which the loss function multiplies the loss.
        before: the first statement that computes logits.
    """
    also = f"\n    and not {unless}" if unless else ""
    return inserting(_LOSS.format(unless=also, loss_mask=loss_mask, page=page), before=before)


def asked_for(args: object) -> bool:
    """Whether a run's arguments select linear cross-entropy."""
    fusion = getattr(args, "cross_entropy_loss_fusion", False)
    return bool(fusion) and getattr(args, "cross_entropy_fusion_impl", "") == "linear"
