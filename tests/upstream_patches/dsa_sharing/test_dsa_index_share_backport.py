"""Layers that are recomputed attend to the keys of their own forward, in releases before 0.19."""

from __future__ import annotations

import json
from functools import cache

import pytest

from tests.support import patched, python

PAGES = ("dsa_index_share", "dsa_index_share_backport")
BESIDE = (
    *("dsa_attention_kernels", "dsa_indexer_kernels", "dsa_indexer_loss_metric"),
    *("dsa_indexer_loss_off", "mtp_full_recompute"),
)
"""Pages for the same layers, and for the MTP depths of these models."""
CASES = "from tests.upstream_patches.dsa import dsa_interleaved as t; t.main(t.of_pattern)"


@cache
def answers(version: str) -> dict[str, dict]:
    """What became of every case on a release."""
    done = python(patched(version, *PAGES, *BESIDE), CASES)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "version", ["0.16.1", pytest.param("0.17.1", marks=pytest.mark.slow), "0.18.2"]
)
def test_layers_keep_to_the_keys_of_their_forward(version: str) -> None:
    found = answers(version)
    assert ("hybrid, MTP: full" in found) == (version == "0.18.2")
    # Projections are recomputed without the attention behind them.
    assert found.pop("projections") == {"kept": None, "same": [True, True], "left": []}
    for name, answer in found.items():
        assert answer == {"kept": True, "same": [True, True], "left": []}, name
