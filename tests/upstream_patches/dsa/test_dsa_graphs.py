"""DSA layers in CUDA graphs compute what they compute without, to the bit, with shared keys too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support import patched, pristine, python

PAGES = (
    *("dsa_index_share_holder", "dsa_no_host_sync", "dsa_indexer_loss_in_graphs"),
    *("dsa_indexer_kernels", "dsa_attention_kernels"),
)


def _replayed() -> dict[str, dict]:
    code = "from tests.upstream_patches.dsa import dsa_graphs; dsa_graphs.main()"
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = python(patched("0.19.2", *PAGES), code, env=deterministic)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict] = json.loads(done.stdout.splitlines()[-1])
    return found


def _assert_like_eager(found: dict[str, dict]) -> None:
    assert len(found) == 4
    for name, case in found.items():
        assert case == {"differ": [], "changes": True, "logged by the capture": [0.0, 0.0]}, name


@pytest.mark.gpu
def test_replays_on_new_data_equal_eager_to_the_bit() -> None:
    _assert_like_eager(_replayed())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU captures")
def test_layers_that_are_captured_alone_find_the_keys_of_their_microbatch() -> None:
    _assert_like_eager(_replayed())


def _local_graphs(root: Path) -> dict[str, dict]:
    code = "from tests.upstream_patches.dsa import dsa_local_graphs; dsa_local_graphs.main()"
    done = python(root, code)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="the code must run without being captured")
def test_megatrons_own_graphs_read_the_keys_of_their_microbatch_and_these_are_kept() -> None:
    found = _local_graphs(patched("0.19.2", *PAGES))
    for doing, (one, other) in found["keys"].items():
        assert all(a == b != c == d for a, b, c, d in (one, other)), doing
        assert not set(one) & set(other), doing
    assert not any(found["alive"]["step"] + found["alive"]["warm-up"])
    assert all(found["alive"]["capture"])
    assert found["calls of replays"] == 0, "a replayed step, or an evaluation, ran a layer"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the code must run without being captured")
def test_stock_releases_the_keys_that_a_graph_of_an_earlier_microbatch_reads() -> None:
    alive = _local_graphs(pristine("0.19.2"))["alive"]["capture"]
    assert alive == [False] * 4 + [True] * 4
