"""RoPE of packed sequences is bitwise that of stock, forward and backward, without host syncs."""

from __future__ import annotations

import inspect
import itertools
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "rope_thd_no_host_sync"
LENGTHS = ([4, 8, 12], [8], [4, 0, 4], [0, 16, 4], [12, 4, 4, 4, 8, 0, 0])
"""Multiples of 2 x 2 ranks; a pack filled up to a fixed number of sequences ends in empty ones."""


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_rope(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core.models.common.embeddings import rope_utils as patched

    from cppmega.proof.host_sync import HostSyncError, no_host_sync

    unpatched = stock.module("megatron.core.models.common.embeddings.rope_utils")
    names = inspect.signature(patched._apply_rotary_pos_emb_thd).parameters
    assert list(names) == list(inspect.signature(unpatched._apply_rotary_pos_emb_thd).parameters)
    mla = (
        "mla_rotary_interleaved" if "mla_rotary_interleaved" in names else "multi_latent_attention"
    )

    torch.manual_seed(0)
    for lengths, ranks, whole_table in itertools.product(LENGTHS, (1, 2), (False, True)):
        for rank, dtype, interleaved in itertools.product(
            range(ranks),
            (torch.float32, torch.bfloat16),
            ({}, {"rotary_interleaved": True}, {mla: True}),
        ):
            if 0 in lengths and "rotary_interleaved" in interleaved:
                continue  # stock 0.19 fails at an empty sequence
            given = case(lengths, ranks, rank, whole_table, dtype) | interleaved
            wanted = outcome(unpatched, given)
            with no_host_sync():
                got = outcome(patched, given)
            for ours, theirs in zip(got, wanted, strict=True):
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), (lengths, ranks)
            with pytest.raises(HostSyncError), no_host_sync():
                outcome(unpatched, given)

    refuses_what_stock_refuses(patched, unpatched)


def case(
    lengths: list[int], ranks: int, rank: int, whole_table: bool, dtype: Any
) -> dict[str, Any]:
    boundaries = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    rows = sum(lengths) if whole_table else max(lengths) + 3
    return {
        "t": torch.randn(sum(lengths) // ranks, 3, 10).to(dtype).requires_grad_(),
        "cu_seqlens": boundaries,
        "freqs": torch.randn(rows, 1, 1, 8),
        "mscale": 1.1,
        "cp_group": SimpleNamespace(size=lambda: ranks, rank=lambda: rank),
    }


def outcome(module: ModuleType, given: dict[str, Any]) -> tuple[Any, Any]:
    """Return output and gradient."""
    out = module._apply_rotary_pos_emb_thd(**given)
    (gradient,) = torch.autograd.grad((out.float() ** 2).sum(), given["t"])
    return out.detach(), gradient


def refuses_what_stock_refuses(*modules: ModuleType) -> None:
    for lengths, ranks, changes in (
        ([4, 4], 1, {"t": torch.zeros(9, 3, 10)}),  # tokens that no sequence has
        ([4, 4], 1, {"t": torch.zeros(7, 3, 10)}),
        ([4, 4], 1, {"freqs": torch.zeros(3, 1, 1, 8)}),  # a table that ends too early
        ([2, 2], 2, {}),  # a sequence that cannot be cut into two halves per rank
        ([4, 4], 1, {"cp_group": None}),
    ):
        given = case(lengths, ranks, 0, False, torch.float32) | changes
        for module in modules:
            with pytest.raises((RuntimeError, IndexError, ValueError)):
                module._apply_rotary_pos_emb_thd(**given)
