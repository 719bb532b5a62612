"""Compute the MTP losses without their logits, for `--cross-entropy-fusion-impl linear`.

What: `process_mtp_loss` (on 0.16 the loop in `GPTModel`) computes each depth's loss, and on 0.19
    the tokens for its acceptance rate, from the hidden states if the output layer is a
    `LinearCrossEntropyModule`. Masks, logging, scaling and detached heads are unchanged. A model
    with its own loss, a bias or gathered logits ends the run with the reason, unless
    `--allow-fallback mtp_linear_ce` lets it use Megatron's path.
Why: Each depth holds logits `[s, b, V]` and an fp32 copy of them until its backward pass: a GPT
    model of 2 layers with 2 depths and V=131072 needs 71 GiB more than without them at MBS 8 (one
    H200).
Upstream: Not sent: dev does this for GPTModel, but its kernels support only Blackwell.
Remove: when the releases have a linear cross-entropy that runs on Hopper.
Numerics: reorders sums: the softmax is computed in fp32 from the same logits, chunk by chunk; dW is
    accumulated in fp32. The label -100 has no loss; in stock its loss is meaningless.
"""

from cppmega.catalogue.megatron_args import has_mtp
from cppmega.edits import in_order, inserting, replacing
from cppmega.page import Edit, Patch, Source

from ._linear_ce.edits import asked_for

MTP = "megatron/core/transformer/multi_token_prediction.py"
TARGET = f"{MTP}:process_mtp_loss"
INLINE = "megatron/core/models/gpt/gpt_model.py:GPTModel._postprocess"
"""The location of the loop over the depths in 0.16."""

FIND = """
linear_ce = None  # what computes a depth's loss without its logits
if (
    getattr(config, 'cross_entropy_loss_fusion', False)
    and config.cross_entropy_fusion_impl == 'linear'
):
    from cppmega.features.linear_cross_entropy.heads import find_head

    linear_ce = find_head(
        output_layer,
        output_weight,
        runtime_gather_output,
        compute_language_model_loss,
        scale_logits_fn,
        'mtp_linear_ce',
        rolled_mask=loss_mask,
    )
"""
LOGITS = """
mtp_logits, _ = output_layer(
    hidden_states_list[mtp_layer_number + 1],
    weight=output_weight,
    runtime_gather_output=runtime_gather_output,
)
if scale_logits_fn is not None:
    mtp_logits = scale_logits_fn(mtp_logits)
"""
NO_LOGITS = """
if linear_ce is None:
    mtp_logits, _ = output_layer(
        hidden_states_list[mtp_layer_number + 1],
        weight=output_weight,
        runtime_gather_output=runtime_gather_output,
    )
    if scale_logits_fn is not None:
        mtp_logits = scale_logits_fn(mtp_logits)
"""
LOSS = "mtp_loss = compute_language_model_loss(mtp_labels, mtp_logits)"
NEW_LOSS = """
if linear_ce is None:
    mtp_loss = compute_language_model_loss(mtp_labels, mtp_logits)
else:
    # The mask of this depth is what MTPLossAutoScaler's gradient is multiplied by.
    mtp_loss, correct, total = linear_ce(
        hidden_states_list[mtp_layer_number + 1], mtp_labels, loss_mask, {accepted}
    )
"""
COUNTS = """
correct, total = _compute_mtp_acceptance_counts(
    mtp_logits, mtp_labels, loss_mask, output_layer, runtime_gather_output, tp_group
)
"""
NEW_COUNTS = """
if linear_ce is None:
    correct, total = _compute_mtp_acceptance_counts(
        mtp_logits, mtp_labels, loss_mask, output_layer, runtime_gather_output, tp_group
    )
"""


def without_logits(accepted: str):  # type: ignore[no-untyped-def]
    """Return the edit; the expression `accepted` is true if acceptance counts are needed."""
    return in_order(
        inserting(FIND, before="original_num_tokens = loss_mask.sum()"),
        replacing(LOGITS, NO_LOGITS),
        replacing(LOSS, NEW_LOSS.format(accepted=accepted)),
    )


INLINE_FIND = """
linear_ce = None  # what computes a depth's loss without its logits
if self.config.cross_entropy_loss_fusion and self.config.cross_entropy_fusion_impl == 'linear':
    from cppmega.features.linear_cross_entropy.heads import find_head

    linear_ce = find_head(
        self.output_layer,
        output_weight,
        runtime_gather_output,
        self.compute_language_model_loss,
        None,
        'mtp_linear_ce',
        rolled_mask=loss_mask,
    )
"""
INLINE_LOGITS = """
mtp_logits, _ = self.output_layer(
    hidden_states_list[mtp_layer_number + 1],
    weight=output_weight,
    runtime_gather_output=runtime_gather_output,
)
"""
INLINE_NO_LOGITS = """
if linear_ce is None:
    mtp_logits, _ = self.output_layer(
        hidden_states_list[mtp_layer_number + 1],
        weight=output_weight,
        runtime_gather_output=runtime_gather_output,
    )
"""
INLINE_LOSS = "mtp_loss = self.compute_language_model_loss(mtp_labels, mtp_logits)"
INLINE_NEW_LOSS = """
if linear_ce is None:
    mtp_loss = self.compute_language_model_loss(mtp_labels, mtp_logits)
else:
    # The mask of this depth is what MTPLossAutoScaler's gradient is multiplied by.
    mtp_loss = linear_ce(
        hidden_states_list[mtp_layer_number + 1], mtp_labels, loss_mask
    ).loss
"""

PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=TARGET,
            pins={"0.17.1": "da492af27f9167a0", "0.18.2": "b7136abdc86ef7be"},
            edit=without_logits("accepted=False"),
        ),
        Edit(
            target=TARGET,
            pins={"0.19.2": "23dfe1e189d9ba30"},
            edit=in_order(without_logits("accepted=is_training"), replacing(COUNTS, NEW_COUNTS)),
        ),
        Edit(
            target=INLINE,
            pins={"0.16.1": "46958da335bff1de"},
            edit=in_order(
                inserting(INLINE_FIND, before="mtp_labels = labels.clone()"),
                replacing(INLINE_LOGITS, INLINE_NO_LOGITS),
                replacing(INLINE_LOSS, INLINE_NEW_LOSS),
            ),
        ),
    ),
    reached="forward",
    feature=(
        f"{MTP}:roll_tensor",
        "megatron/core/tensor_parallel/layers.py:ColumnParallelLinear.backward_dw",
    ),
    when=lambda args: asked_for(args) and has_mtp(args),
    wanted_by=lambda recipe: recipe.uses_linear_cross_entropy and recipe.layout.depths > 0,
    after=("mtp_loss_no_host_sync", "linear_ce_gpt_head"),
)


def fixed_upstream(source: Source) -> bool:
    return "'linear'" in source.text(TARGET)


def verify() -> None:
    from ._linear_ce import proof

    proof.mtp()
