"""The benchmark of shared keys, as far as a CPU can run it: small layers, and no times."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from tests.support import patched, python

sharing = importlib.import_module("benchmarks.dsa_attention")

PAGES = ("dsa_index_share", "dsa_index_share_holder", "dsa_hadamard_transform")
RUNS = """
import json, sys
from unittest import mock

import torch

from benchmarks import dsa_attention as sharing
from cppmega.proof import small_models
from megatron.core.transformer.experimental_attention_variant import dsa

small = dict(sharing.LAYER, hidden_size=32, num_attention_heads=4, dsa_indexer_topk=6)
small |= dict(dsa_indexer_n_heads=4)
small_models.dsa_config()
found = {}
scores, attends = dsa.DSAIndexer.forward_before_topk, dsa._run_sparse_attention
for name in sharing.PATTERNS:
    keys = []

    def noting(**named):
        keys.append(named["topk_indices"].tolist())
        return attends(**named)

    inputs = sharing.LayerInputs(16, 2, "cpu", **small)
    step = sharing.nine_layers(name, inputs, "cpu", **small)
    with (
        mock.patch.object(dsa.DSAIndexer, "forward_before_topk", autospec=True,
                          side_effect=scores) as indexers,
        mock.patch.object(dsa, "_run_sparse_attention", noting),
    ):
        results = step()
    found[name] = {
        "indexers": indexers.call_count,
        "first with its keys": [keys.index(chosen) for chosen in keys],
        "outputs": [list(out.shape) for out in results[:9]],
        "gradients": all(gradient is not None and gradient.any() for gradient in results[9:12]),
    }
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.megatron
def test_each_way_runs_nine_layers_and_its_own_indexers() -> None:
    done = python(patched("0.19.2", *PAGES), RUNS)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    indexers = {"9 Full": 9, "3 Full, 6 Shared": 3, "keys given": 0}
    assert {name: way["indexers"] for name, way in found.items()} == indexers
    assert found[sharing.SHARED]["first with its keys"] == [0, 0, 0, 3, 3, 3, 6, 6, 6]
    assert found[sharing.GIVEN]["first with its keys"] == [0] * 9
    assert found[sharing.FULL]["first with its keys"] == [*range(9)]
    for way in found.values():
        assert way["outputs"] == [[16, 2, 4 * 64]] * 9 and way["gradients"]


def test_the_share_of_the_indexers_time() -> None:
    times = {sharing.FULL: 19.0, sharing.SHARED: 14.0, sharing.GIVEN: 10.0}
    assert sharing.saved(times) == {"six_indexers": 6.0, "saved": 5.0, "share": 0.833}
    ways = {name: {"milliseconds": taken, "peak_gib": 1.5} for name, taken in times.items()}
    head = dict.fromkeys(("gpu", "torch", "triton", "megatron-core", "overlay", "date"), "-")
    text = sharing.sharing_table({**head, "cases": {"b 1": {"ways": ways, **sharing.saved(times)}}})
    assert (
        text.splitlines()[-1]
        == "| b 1 | 19.0 (1.5) | 14.0 (1.5) | 10.0 (1.5) | 6.0 | 5.0 | 83.3% |"
    )
