"""Return an MTP loss of zero instead of NaN for a microbatch without tokens to predict.

What: The MTP loss in `GPTModel._postprocess` is divided by one if no token counts.
Why: The mean over zero tokens is 0/0: if the loss mask of a microbatch ends with its first token,
    or is empty (a prompt without its answer, a padded last batch), the gradient of every layer is
    NaN, and the step is lost on all ranks (tested on 0.15.3 and 0.16.1).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/3396 (0.17.0)
Remove: when 0.16 is no longer supported.
Numerics: changes results of microbatches without such a token, which were NaN; no change otherwise
"""

from cppmega.catalogue.megatron_args import has_mtp
from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

MTP = "megatron/core/transformer/multi_token_prediction.py"
TARGET = "megatron/core/models/gpt/gpt_model.py:GPTModel._postprocess"

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={"0.15.3": "3cfcd42a1b39659e", "0.16.1": "46958da335bff1de"},
            edit=inserting(
                "num_tokens = torch.where(num_tokens > 0, num_tokens, 1)  # none: zero over one",
                before="mtp_loss = loss_mask * mtp_loss",
            ),
        ),
    ),
    reached="forward",
    feature=(f"{MTP}:roll_tensor",),
    when=has_mtp,
    after=("mtp_roll_packed_sequences", "mtp_linear_ce", "linear_ce_gpt_head"),
)


def fixed_upstream(source: Source) -> bool:
    return "num_tokens.clamp(min=1)" in source.text(f"{MTP}:process_mtp_loss")


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import multi_token_prediction as mtp

    from cppmega.proof.stand_ins import Arguments

    config = Arguments(0, mtp_num_layers=1, mtp_loss_scaling_factor=0.5, config_logger_dir="")

    def gradient(mask):  # type: ignore[no-untyped-def]
        """Return the gradient of only the MTP loss."""
        scaled = []
        model = mock.MagicMock(config=config, cp_group=None, training=False)
        model.pg_collection = SimpleNamespace(cp=None, tp=None)
        model.share_embeddings_and_output_weights = False
        model.output_layer.side_effect = lambda *given, **named: (
            given[0] if given else named.get("input_", named.get("hidden_states")),
            None,
        )
        model.compute_language_model_loss.side_effect = lambda labels, logits: (
            logits.sum(-1).t() * labels
        )
        states = torch.ones(8, 1, 2, requires_grad=True)
        take = mock.patch.object(mtp.MTPLossAutoScaler, "apply", lambda h, s: scaled.append(s) or h)
        with take:
            ids, mask = torch.arange(4.0)[None], torch.tensor([mask])
            rest = dict.fromkeys(("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"))
            GPTModel._postprocess(model, states, ids, ids, ids, loss_mask=mask, **rest)
        (found,) = torch.autograd.grad(scaled[0].sum(), states)
        return found[4:, 0, 0].tolist()

    assert gradient([1.0, 1.0, 0.0, 1.0]) == [
        0.25,
        0.0,
        0.75,
        0.0,
    ]  # labels 1, 2, 3; two of them count
    for mask in ([0.0] * 4, [1.0, 0.0, 0.0, 0.0]):
        assert gradient(mask) == [0.0] * 4, "without a token the gradient must be zero"
