"""The MTP loss of microbatches where few tokens count, or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "mtp_loss_of_no_tokens"
DEPTHS = 2


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
    """What is logged of each depth, and the gradient of all that MTP adds to the loss."""
    from megatron.core.transformer import multi_token_prediction as mtp

    logged: list[Any] = []
    scaled: list[Any] = []
    config = mock.MagicMock(
        mtp_num_layers=DEPTHS,
        mtp_loss_scaling_factor=0.3,
        calculate_per_token_loss=per_token,
        cross_entropy_loss_fusion=False,
        config_logger_dir="",
    )
    model = mock.MagicMock(config=config, cp_group=None, training=True)
    model.pg_collection = SimpleNamespace(cp=None, tp=None)
    model.share_embeddings_and_output_weights = False
    model.output_layer.side_effect = lambda hidden, **_: (hidden, None)
    model.compute_language_model_loss.side_effect = lambda labels, logits: (
        logits.float().pow(2).sum(-1).t() * (labels + 1)
    )
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn((1 + DEPTHS) * 6, 2, 5, generator=generator, requires_grad=True)
    labels = torch.arange(12).view(2, 6)
    helper, scaler, groups = mtp.MTPLossLoggingHelper, mtp.MTPLossAutoScaler, mtp.parallel_state
    with (
        mock.patch.object(
            helper, "save_loss_to_tracker", lambda loss, *_, **__: logged.append(loss)
        ),
        mock.patch.object(scaler, "apply", lambda given, loss: scaled.append(loss) or given),
        mock.patch.object(groups, "get_data_parallel_group", lambda *_, **__: None),
    ):
        rest = dict.fromkeys(("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"))
        module.GPTModel._postprocess(model, hidden, labels, labels, labels, loss_mask=mask, **rest)
    (gradient,) = torch.autograd.grad(sum(loss.sum() for loss in scaled), hidden)
    return [*(loss.detach() for loss in logged), gradient]
