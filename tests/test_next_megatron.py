"""What only the overlay can build trains on Megatron's main as on the newest release.

Small models take the same steps on both, from the weights of the release, which main loads.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import BRANCHES, VERSIONS, patched, python

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

MAIN = next(branch for branch in BRANCHES if branch.startswith("main-"))
MODELS = (
    *("own mixers and n-grams", "hyper-connections", "hyper-connections, hybrid"),
    "MTP and experts",
)
TRAINS = """
import json, os
from pathlib import Path
from unittest import mock
import torch
from megatron.core.tensor_parallel import random
from cppmega.features.embeddings.layer import feeding
from cppmega.proof import small_models
from cppmega.sizes import embeddings, mixers, stated

mock.patch.object(random, "_get_cuda_rng_state", return_value=None).start()
mock.patch.object(random, "_set_cuda_rng_state").start()
SIZES = {
    "CPPMEGA_MAMBA3": mixers.Mamba3(head_dim=4, state_dim=8, groups=2, rank=2, chunk=4),
    "CPPMEGA_M2RNN": mixers.M2RNN(key_dim=4, value_dim=4, conv=2),
    "CPPMEGA_NGRAM_HASH": embeddings.NgramHash((2,), 2, (89, 97), 4),
}
STREAMS = {"enable_mhc_connections": True, "mhc_num_residual_streams": 2}

def mixed():
    with mock.patch.dict(os.environ, {name: stated.text(sizes) for name, sizes in SIZES.items()}):
        return small_models.hybrid(pattern="M*R-")

MODELS = {
    "own mixers and n-grams": mixed,
    "hyper-connections": lambda: small_models.gpt(num_layers=2, **STREAMS),
    "hyper-connections, hybrid": lambda: small_models.hybrid(**STREAMS),
    "MTP and experts": lambda: small_models.gpt(mtp=2, num_moe_experts=4, add_bias_linear=False),
}

def losses_of(name):
    model, weights = MODELS[name](), Path(os.environ["WEIGHTS"], name)
    if weights.exists():
        model.load_state_dict(torch.load(weights))
    else:
        torch.save(model.state_dict(), weights)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for step in range(4):
        given = small_models.arguments(model)
        if name.startswith("own"):
            given["input_ids"] = feeding(given["input_ids"].clone(), end=0)
        loss = model(**given).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

print("LOSSES", json.dumps({name: losses_of(name) for name in MODELS}))
"""


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses of every model by version."""
    weights, found = tmp_path_factory.mktemp("weights"), {}
    for version in (VERSIONS[-1], MAIN):
        done = python(patched(version), TRAINS, env={"WEIGHTS": str(weights)})
        assert "LOSSES" in done.stdout, done.stderr[-3000:]
        found[version] = json.loads(done.stdout.partition("LOSSES")[2])
    return found


@pytest.mark.parametrize("model", MODELS)
def test_main_trains_as_the_release(losses: dict[str, Any], model: str) -> None:
    release, main = (losses[version][model] for version in (VERSIONS[-1], MAIN))
    assert main == release
    assert release[-1] < release[0]
