"""Layers of Mamba-3 and M2RNN in local CUDA graphs train as they do without, to the bit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.support import patched, python

PAGES = (
    *("own_mixers", "float16_keep_fp32", "grad_accumulation_without_apex"),
    *("local_graph_hidden_parameters", "local_graph_kept_outputs", "te_plain_layers"),
)


def _assert_like_eager(**how: Any) -> None:
    code = "from tests.upstream_patches.mamba import mixer_graphs; mixer_graphs.main()"
    done = python(patched("0.19.2", *PAGES), code, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"eager": [], "graphs": []}


@pytest.mark.gpu
def test_replays_on_new_data_equal_eager_to_the_bit() -> None:
    _assert_like_eager()


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU captures")
@pytest.mark.parametrize("interprets", [False, True], ids=["plain torch", "kernels"])
def test_what_a_capture_notes_repeats_all_of_a_layer(interprets: bool) -> None:
    _assert_like_eager(interprets=interprets)
