"""The per-token MTP loss on two data- or context-parallel ranks is that of all their tokens."""

from __future__ import annotations

import pytest

from tests.support import VERSIONS, patched, python

PAGE = "mtp_per_token_counts"

CODE = """
from unittest import mock

import torch
from cppmega.proof import cpu_shims
from cppmega.proof.stand_ins import Arguments

cpu_shims.shim()
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
from megatron.core import parallel_state
from megatron.core.transformer import multi_token_prediction as mtp


def gradients(labels, mask, cp_group):
    config = Arguments(
        mtp_num_layers=2,
        mtp_loss_scaling_factor=0.2,
        calculate_per_token_loss=True,
        hybrid_context_parallel=False,
    )
    hidden = torch.ones(3 * len(mask), 1, 1, requires_grad=True)
    mtp.MTPLossAutoScaler.main_loss_backward_scale = torch.ones(())
    with (
        mock.patch.object(mtp.MTPLossLoggingHelper, "tracker", {}),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
    ):
        out = mtp.process_mtp_loss(
            hidden_states=hidden,
            labels=labels[None],
            loss_mask=mask[None],
            output_layer=lambda hidden, **_: (hidden, None),
            output_weight=None,
            runtime_gather_output=True,
            is_training=True,
            compute_language_model_loss=lambda labels, logits: logits[..., 0].t() * labels,
            config=config,
            cp_group=cp_group,
        )
        out.sum().backward()
    return hidden.grad.view(3, -1)[1:]


# Two sequences of 8 tokens, on one data-parallel rank each, or the first on two ranks.
labels = torch.arange(1.0, 17.0).view(2, 8)
masks = torch.tensor([[1, 1, 1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 0, 1, 0, 0]]).float()
for context in (1, 2):
    parallel_state.initialize_model_parallel(context_parallel_size=context)
    if context == 1:
        mine, used, group = (rank, slice(None)), slice(None), None
    else:
        mine = (0, [2 * rank, 2 * rank + 1, 6 - 2 * rank, 7 - 2 * rank])
        used, group = slice(1), parallel_state.get_context_parallel_group()
    found = gradients(labels[mine], masks[mine], group)
    for depth, got in enumerate(found, 1):
        rolled = [torch.roll(every, -depth, -1) for every in (labels, masks)]
        for every in rolled:
            every[:, -depth:] = 0
        ratio = masks[used].sum() / rolled[1][used].sum()
        wanted = 0.1 * ratio * rolled[0][mine] * rolled[1][mine]
        assert torch.allclose(got, wanted), (context, depth, got, wanted)
    parallel_state.destroy_model_parallel()
"""


@pytest.mark.megatron
def test_on_two_ranks() -> None:
    done = python(patched(VERSIONS[-1], PAGE), CODE, nproc=2)
    assert done.returncode == 0, done.stderr
