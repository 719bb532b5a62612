"""Log the MTP loss without reading the number of tokens on the host.

What: `process_mtp_loss` chooses between the mean and zero on the device.
Why: `... if num_tokens > 0 else ...` waits for the GPU once per MTP depth and microbatch, and
    cannot be captured in a CUDA graph (tested: the only host sync of the function on 0.17.1).
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/4247 (0.18.0)
Remove: when 0.17 is no longer supported.
Numerics: none (bitwise)
"""

from cppmega.catalogue.megatron_args import has_mtp
from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/core/transformer/multi_token_prediction.py:process_mtp_loss"

PATCH = Patch(
    purpose="speed",
    edits=(
        Edit(
            target=TARGET,
            pins={"0.17.1": "da492af27f9167a0"},
            edit=replacing(
                "torch.sum(mtp_loss) / num_tokens if num_tokens > 0 else mtp_loss.new_tensor(0.0)",
                "torch.where(num_tokens > 0, torch.sum(mtp_loss) / num_tokens, 0.0)",
            ),
        ),
    ),
    reached="forward",
    # Up to 0.16 the model computes this loss itself.
    feature=(
        "megatron/core/transformer/multi_token_prediction.py:MultiTokenPredictionLayer.forward_single_position",
    ),
    when=has_mtp,
    asked_by=("--mtp-num-layers", "1"),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and "if num_tokens > 0" not in text


def verify() -> None:
    from unittest import mock

    import torch
    from megatron.core.transformer import multi_token_prediction as mtp

    from cppmega.proof.stand_ins import Arguments

    config = Arguments(mtp_num_layers=1, mtp_loss_scaling_factor=0.1)

    def logged(mask, device="cpu"):  # type: ignore[no-untyped-def]
        with (
            mock.patch.object(mtp.MTPLossLoggingHelper, "tracker", {}) as tracker,
            mock.patch.object(torch.cuda, "current_device", return_value=device),
            mock.patch.object(mtp.parallel_state, "get_data_parallel_group", lambda *_, **__: None),
        ):
            mtp.process_mtp_loss(
                hidden_states=torch.ones(8, 1, 2, device=device),
                labels=torch.arange(4, device=device)[None],
                loss_mask=torch.tensor([mask]).to(device),
                output_layer=lambda hidden, **_: (hidden, None),
                output_weight=None,
                runtime_gather_output=True,
                is_training=True,
                compute_language_model_loss=lambda labels, logits: labels.float() + 1,
                config=config,
            )
        names = {"values", "loss_values", "loss_sums"}  # their names in three versions
        (losses,) = [tracker[name] for name in names & set(tracker)]
        return losses[0]

    # A meta tensor has no values: reading one raises.
    assert logged([1.0, 1.0, 1.0, 1.0], "meta").shape == ()
    assert logged([1.0, 1.0, 0.0, 1.0]).item() == 3.0  # rolled: labels 1, 2, 3, mask 1, 0, 1
    assert logged([0.0, 1.0, 0.0, 0.0]).item() == 2.0  # of a single token
    assert logged([1.0, 0.0, 0.0, 0.0]).item() == 0.0, "the loss must be zero if no token counts"
