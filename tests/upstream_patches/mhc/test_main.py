"""Models of the recipes on the main branch: the losses of 0.19.2, from its checkpoints, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import VERSIONS, patched, python

PAGES = ("own_mixers", "input_embeddings", "mhc_connections", "float16_keep_fp32")
LOSSES = """
import json, os, sys
from unittest import mock

import torch
from cppmega.features.embeddings.layer import feeding
from cppmega.proof import cpu_shims, small_models
from cppmega.sizes import embeddings, mixers, stated

cpu_shims.init_distributed()
STREAMS = {{"enable_mhc_connections": True, "mhc_num_residual_streams": 2}}
SIZES = {{
    "CPPMEGA_MAMBA3": mixers.Mamba3(head_dim=4, state_dim=8, groups=2, rank=2, chunk=4),
    "CPPMEGA_NGRAM_HASH": embeddings.NgramHash((2,), 2, (89, 97), 4),
}}

def losses(make, **options):
    model = make(**options)
    if os.path.exists({kept!r} + make.__name__):
        model.load_state_dict(torch.load({kept!r} + make.__name__, weights_only=False))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        given = small_models.arguments(model)
        given["input_ids"] = feeding(given["input_ids"].clone(), end=0)
        loss = model(**given).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
    torch.save(model.state_dict(), {kept!r} + make.__name__ + {saved!r})

with mock.patch.dict(os.environ, {{name: stated.text(each) for name, each in SIZES.items()}}):
    of_gpt = [*losses(small_models.gpt, mtp=1, **STREAMS)]
    of_hybrid = [*losses(small_models.hybrid, pattern="M*M-", **STREAMS)]
print(json.dumps([of_gpt, of_hybrid]))
"""


@pytest.mark.megatron
def test_losses_and_checkpoints_are_those_of_the_release(tmp_path: Path) -> None:
    """Mamba-3, n-grams and hyper-connections, in a hybrid model and in a GPT with an MTP depth."""
    trees = [patched(version, *PAGES) for version in (VERSIONS[-1], "main-d98e8a64")]

    def losses(root: Path, saved: str) -> list[list[float]]:
        code = LOSSES.format(kept=f"{tmp_path}/", saved=saved)
        done = python(root, code)
        assert done.returncode == 0, done.stderr[-3000:]
        found: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
        return found

    assert losses(trees[1], ".of_main") == losses(trees[0], "")
    assert losses(trees[1], ".of_main") == losses(trees[0], ".of_release")
