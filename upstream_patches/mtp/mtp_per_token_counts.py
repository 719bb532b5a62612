"""Weigh the MTP loss of every token alike under `--calculate-per-token-loss`.

What: `process_mtp_loss` takes the ratio of the model's tokens to those of an MTP depth over all
    data- and context-parallel ranks, instead of the rank's own.
Why: The gradients are divided by the tokens of all ranks, and the ratio is to make up for the
    tokens that a depth does not predict. The rank's own ratio gives its tokens another weight than
    those of other ranks have: on two ranks, of which one predicts 4 tokens and the other 1 (then 3
    and 0 in the depth), the loss of a depth is 4/5 of its mean; the context-parallel rank that
    has the end of a sequence weighs its tokens more than the others (tested on CPU, on 0.17.1 to
    0.19.2). Up to 0.16, all tokens have one weight.
Upstream: https://github.com/NVIDIA/Megatron-LM/issues/7452 (open);
    https://github.com/NVIDIA/Megatron-LM/pull/7498 (open) does it for context parallelism.
Remove: when the counts are reduced before `calculate_per_token_loss` divides them.
Numerics: changes results of runs with MTP and `--calculate-per-token-loss` whose ranks differ in
    their ratios, as they do with masks or context parallelism. The micro-batches of a step keep
    their own ratios: they are not known before the last one. So do the ranks under hybrid and
    dynamic context parallelism, where they have different numbers of micro-batches.
"""

from typing import Any

from cppmega.catalogue.megatron_args import has_mtp
from cppmega.edits import in_order, replacing
from cppmega.page import Edit, Patch, Source

MTP = "megatron/core/transformer/multi_token_prediction.py"
TARGET = f"{MTP}:process_mtp_loss"


def has_ratio(args: Any) -> bool:
    """Whether the run trains MTP depths with the ratio of their tokens to the model's."""
    return (
        has_mtp(args)
        and bool(getattr(args, "calculate_per_token_loss", False))
        and not getattr(args, "skip_train", False)
    )


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.17.1": "da492af27f9167a0",
                "0.18.2": "b7136abdc86ef7be",
                "0.19.2": "23dfe1e189d9ba30",
                "main-d98e8a64": "23dfe1e189d9ba30",
                "dev-d48bd6be": "3a150c21a7ee0ca2",
            },
            edit=in_order(
                replacing(
                    "num_tokens_safe = torch.clamp(num_tokens, min=1)",
                    """
                    counts = torch.stack((original_num_tokens, num_tokens))
                    # Otherwise, ranks have different numbers of micro-batches.
                    if is_training and not (
                        getattr(config, 'hybrid_context_parallel', False)
                        or getattr(config, 'dynamic_context_parallel', False)
                    ):
                        # The gradients are divided by the tokens of all ranks, too.
                        torch.distributed.all_reduce(
                            counts,
                            group=parallel_state.get_data_parallel_group(
                                with_context_parallel=True
                            ),
                        )
                    """,
                ),
                replacing(
                    "original_num_tokens / num_tokens_safe", "counts[0] / counts[1].clamp(min=1)"
                ),
            ),
        ),
    ),
    reached="forward",
    # Up to 0.16 the model computes this loss itself, without the ratio.
    feature=(f"{MTP}:MultiTokenPredictionLayer.forward_single_position",),
    when=has_ratio,
    after=("mtp_loss_no_host_sync", "mtp_linear_ce"),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and "original_num_tokens / num_tokens_safe" not in text


def verify() -> None:
    from unittest import mock

    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_token_prediction as mtp

    from cppmega.proof import ranks
    from cppmega.proof.stand_ins import Arguments

    labels = torch.arange(1.0, 9.0)
    masks = torch.tensor(
        [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0, 0, 1], [1, 0, 1, 0, 0, 0, 0, 0]]
    ).float()

    def gradients(rank, mask):  # type: ignore[no-untyped-def]
        """Return those of the hidden states of two depths, of this rank's part of the sequence."""
        mine = [2 * rank, 2 * rank + 1, 6 - 2 * rank, 7 - 2 * rank]
        config = Arguments(
            mtp_num_layers=2,
            mtp_loss_scaling_factor=0.2,
            calculate_per_token_loss=True,
            hybrid_context_parallel=False,
            dynamic_context_parallel=False,
        )
        hidden = torch.ones(12, 1, 1, requires_grad=True)
        with (
            mock.patch.object(mtp.MTPLossLoggingHelper, "tracker", {}),
            mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
            mock.patch.object(mtp.MTPLossAutoScaler, "main_loss_backward_scale", torch.ones(())),
        ):
            out = mtp.process_mtp_loss(
                hidden_states=hidden,
                labels=labels[None, mine],
                loss_mask=mask[None, mine],
                output_layer=lambda hidden, **_: (hidden, None),
                output_weight=None,
                runtime_gather_output=True,
                is_training=True,
                compute_language_model_loss=lambda labels, logits: logits[..., 0].t() * labels,
                config=config,
                cp_group=parallel_state.get_context_parallel_group(),
            )
            out.sum().backward()
        return mine, hidden.grad.view(3, 4)[1:]

    answers = ranks.on_two(lambda rank: [gradients(rank, mask) for mask in masks], context=2)
    for number, mask in enumerate(masks):
        for depth in (1, 2):
            ahead = torch.cat((mask[depth:], torch.zeros(depth)))
            ratio = mask.sum() / ahead.sum().clamp(min=1)
            wanted = 0.1 * ratio * ahead * torch.cat((labels[depth:], torch.zeros(depth)))
            for mine, found in (of_rank[number] for of_rank in answers):
                assert torch.allclose(found[depth - 1], wanted[mine]), (mask, depth, found)
