"""Layers that are recomputed attend to the keys of their own forward, and nothing is left of it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import patched, pristine, python
from tests.support.rules import broken
from tests.upstream_patches.dsa.dsa_layers import patch_of

PAGE = "dsa_index_share_holder"
CASES = "from tests.upstream_patches.dsa import dsa_interleaved as t; t.main(t.of_options)"


@cache
def answers(root: Path) -> dict[str, dict]:
    """What became of every case on a tree."""
    done = python(root, CASES)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_layers_keep_to_the_keys_of_their_forward() -> None:
    for name, answer in answers(patched("0.19.2", PAGE)).items():
        assert answer == {"kept": True, "same": [True, True], "left": []}, name


def test_stock_uses_the_keys_of_another_forward() -> None:
    found = answers(pristine("0.19.2"))
    for name, answer in found.items():
        assert "error" in answer or not (answer["kept"] or all(answer["same"])), name
    assert "chosen keys" in found["gpt: full"]["left"] and len(found["gpt: full"]["left"]) > 2


SOME_LAYERS = "capture the attention of only some layers"
SCHEDULE = "--overlap-moe-expert-parallel-comm"
LOCAL, TE = {"cuda_graph_impl": "local"}, {"cuda_graph_impl": "transformer_engine"}
MIXED = {"num_experts": 8, "moe_layer_freq": [0, 1, 1]}
HYBRID = {"hybrid_layer_pattern": "D-DE", "num_experts": 8, "moe_layer_freq": [0, 1, 1]}


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, []),
        (LOCAL, []),
        ({**TE, "cuda_graph_modules": ["attn"]}, []),
        ({"cuda_graph_impl": "full_iteration"}, []),
        ({"cuda_graph_impl": "none", "enable_cuda_graph": True}, []),
        ({"external_cuda_graph": True, "cuda_graph_scope": "full"}, []),
        ({**LOCAL, **MIXED}, []),
        ({**LOCAL, **MIXED, "cuda_graph_modules": "full"}, []),
        ({**LOCAL, **MIXED, "cuda_graph_modules": ["moe_router"]}, []),
        ({**LOCAL, **MIXED, "cuda_graph_modules": ["attn"]}, [SOME_LAYERS]),
        ({**LOCAL, **MIXED, "cuda_graph_modules": ["attn", "moe_router"]}, [SOME_LAYERS]),
        ({**LOCAL, **MIXED, "cuda_graph_modules": ["mlp"]}, [SOME_LAYERS]),
        ({**LOCAL, **MIXED, "cuda_graph_modules": ["moe"]}, [SOME_LAYERS]),
        ({**LOCAL, **MIXED, "cuda_graph_modules": ["attn", "moe"]}, []),
        ({**LOCAL, **MIXED, "cuda_graph_modules": ["attn"], "moe_layer_freq": 2}, [SOME_LAYERS]),
        ({**LOCAL, **MIXED, "cuda_graph_modules": ["attn"], "moe_layer_freq": 1}, []),
        ({**LOCAL, **MIXED, "cuda_graph_modules": ["attn"], "moe_layer_freq": [1, 1]}, []),
        ({**LOCAL, **MIXED, "cuda_graph_modules": ["attn"], "num_experts": None}, []),
        ({**LOCAL, **HYBRID, "cuda_graph_modules": ["attn", "moe_router"]}, []),
        ({**TE, **MIXED, "cuda_graph_modules": ["attn"]}, []),
        ({"overlap_moe_expert_parallel_comm": True}, [SCHEDULE]),
        ({"overlap_moe_expert_parallel_comm": True, "dsa_indexer_topk_freq": 1}, []),
    ],
)
def test_keys_that_a_layer_could_not_find_are_refused(
    given: dict[str, object], refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"experimental_attention_variant": "dsa", "dsa_indexer_topk_freq": 2, "bf16": True}
    args |= {"num_layers": 4, **given}
    words = [error.what for error in broken(PAGE, **args) if "share keys" in error.what]
    assert len(words) == len(refused)
    assert all(word in said for word, said in zip(refused, words, strict=True))
    if args["dsa_indexer_topk_freq"] == 1:
        patch = patch_of(PAGE)
        assert not patch.when(SimpleNamespace(**args))
        monkeypatch.setenv("CPPMEGA_INDEX_CACHE", "1")
        assert patch.when(SimpleNamespace(**args))
        args |= {"dsa_indexer_topk_freq": 2}
        assert broken(PAGE, **args)
