"""The MTP loss of microbatches in which few tokens count, or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "mtp_loss_of_no_tokens"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_mtp_loss(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.models.gpt import gpt_model as patched

    from cppmega.proof import cpu_shims

    cpu_shims.init_distributed()
    unpatched = stock.module("megatron.core.models.gpt.gpt_model")
    weights = torch.tensor([[1.0, 0.5, 0.0, 0.25, 0.0, 0.0], [0.0] * 6])
    for per_token in (False, True):
        for mask in (weights, weights.bool().long(), torch.ones(2, 6), None):
            ours, theirs = (outcome(m, mask, per_token) for m in (patched, unpatched))
            for a, b in zip(ours, theirs, strict=True):
                assert torch.equal(a, b), "a token counts: the bits of stock"
        # Depth 1 has the second token, depth 2 has none.
        for mask in (torch.zeros(2, 6), torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]] * 2)):
            some = mask.any().item()
            first, second, gradient = outcome(patched, mask, per_token)
            assert (first > 0).item() is some and second == 0
            assert gradient.isfinite().all() and gradient.any().item() is some
            _, nan, lost = outcome(unpatched, mask, per_token)
            assert nan.isnan() and (per_token or lost.isnan().any())


def outcome(module: Any, mask: Any, per_token: bool) -> list[Any]:
    """Return the logged loss of each depth, and the gradient of all MTP losses."""
    from megatron.core.transformer import multi_token_prediction as mtp

    from tests.upstream_patches.mtp import mtp_loss

    scaled: list[Any] = []
    config = mock.MagicMock(
        mtp_num_layers=mtp_loss.DEPTHS,
        mtp_loss_scaling_factor=0.3,
        calculate_per_token_loss=per_token,
        cross_entropy_loss_fusion=False,
        config_logger_dir="",
    )
    model = mock.MagicMock(config=config, cp_group=None, training=True)
    model.pg_collection = SimpleNamespace(cp=None, tp=None)
    model.share_embeddings_and_output_weights = False
    model.output_layer.side_effect = lambda hidden, **_: (hidden, None)
    model.compute_language_model_loss.side_effect = mtp_loss.loss_of_logits
    hidden, labels = mtp_loss.hidden_states(6, 2), torch.arange(12).view(2, 6)
    take = mock.patch.object(
        mtp.MTPLossAutoScaler, "apply", lambda given, loss: scaled.append(loss) or given
    )
    with mtp_loss.logged(mtp) as losses, take:
        rest = dict.fromkeys(("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"))
        module.GPTModel._postprocess(model, hidden, labels, labels, labels, loss_mask=mask, **rest)
    (gradient,) = torch.autograd.grad(sum(loss.sum() for loss in scaled), hidden)
    return [*(loss.detach() for loss in losses), gradient]
