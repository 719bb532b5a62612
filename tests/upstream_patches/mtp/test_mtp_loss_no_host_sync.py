"""The MTP loss on 0.17.1 is bitwise that of stock, without its host sync."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "mtp_loss_no_host_sync"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_mtp_loss(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.transformer import multi_token_prediction as patched

    from cppmega.proof.host_sync import HostSyncError, no_host_sync

    unpatched = stock.module("megatron.core.transformer.multi_token_prediction")
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(2, (3, 8), generator=generator)
    only_first = torch.zeros(3, 8).index_fill_(
        1, torch.tensor([0]), 1.0
    )  # rolled away: none is left
    for mask in (some.float(), some, torch.ones(3, 8), only_first, None):
        for per_token in (False, True):
            wanted = outcome(unpatched, mask, per_token)
            with no_host_sync():
                got = outcome(patched, mask, per_token)
            assert len(got) == len(wanted) == 4  # two depths, output, gradient
            for ours, theirs in zip(got, wanted, strict=True):
                assert torch.equal(ours, theirs)
            with pytest.raises(HostSyncError), no_host_sync():
                outcome(unpatched, mask, per_token)


def outcome(module: ModuleType, mask: Any, per_token: bool) -> list[Any]:
    """Return what is logged for each depth, the returned hidden states, and their gradient."""
    from tests.upstream_patches.mtp import mtp_loss

    hidden, labels = mtp_loss.hidden_states(8, 3), torch.arange(24).view(3, 8)
    with mtp_loss.logged(module) as losses:
        out = module.process_mtp_loss(
            hidden_states=hidden,
            labels=labels,
            loss_mask=mask,
            output_layer=lambda given, **_: (given, None),
            output_weight=None,
            runtime_gather_output=None,
            is_training=True,
            compute_language_model_loss=mtp_loss.loss_of_logits,
            config=SimpleNamespace(
                mtp_num_layers=mtp_loss.DEPTHS,
                mtp_loss_scaling_factor=0.3,
                calculate_per_token_loss=per_token,
            ),
        )
    (gradient,) = torch.autograd.grad(out.sum(), hidden)
    return [*losses, out, gradient]
