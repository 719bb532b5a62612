"""Which DSA layers share keys is said by their order; real models of both kinds, on the CPU."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import patched, pristine, python
from tests.support.rules import broken

PAGES = ("dsa_index_share", "dsa_index_share_checkpoints")
UP_TO_0_18 = (*PAGES, "dsa_index_share_backport")
VERSIONS = ("0.16.1", "0.18.2", "0.19.2")  # 0.17.1 has the layers of 0.18.2


@cache
def asked(root: Path, *parts: str) -> dict[str, Any]:
    """What models on a tree do."""
    functions = ", ".join(f"t.{part}" for part in parts)
    done = python(
        root,
        f"from tests.upstream_patches.dsa_sharing import dsa_sharing as t; t.main({functions})",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def answer(version: str, part: str) -> dict[str, Any]:
    """What models on a patched tree do; an old release is asked everything in one process."""
    if version == "0.19.2":
        return asked(patched(version, *PAGES), part)[part]
    return asked(patched(version, *UP_TO_0_18), "kinds", "full", "refused", "checkpoints")[part]


def test_a_pattern_trains_as_the_same_options_on_stock_to_the_bit() -> None:
    stock, mine = asked(pristine("0.19.2"), "stock")["stock"], answer("0.19.2", "kinds")
    assert mine["gpt"] == mine["options"] == stock["gpt"]
    assert mine["hybrid"] == stock["hybrid"]  # D at 1, 3, 4, 6, and one of an MTP depth


@pytest.mark.parametrize("version", VERSIONS[:-1])
def test_on_a_release_without_shared_keys_full_layers_train_as_on_stock(version: str) -> None:
    assert answer(version, "full") == asked(pristine(version), "full")["full"]  # to the bit


@pytest.mark.parametrize("version", VERSIONS)
def test_shared_layers_use_the_full_layers_keys_and_own_no_indexer(version: str) -> None:
    found = answer(version, "kinds")
    gpt, hybrid = found["gpt"], found.get("hybrid")
    assert gpt["kinds"] == [False, True, False, True]
    assert (hybrid is None) == (version < "0.18")
    assert hybrid is None or hybrid["kinds"] == [False, True, False, True, False]
    for model in filter(None, (gpt, hybrid)):
        step = len(model["kinds"])
        assert len(model["used"]) == 2 * step  # training, and evaluation
        for at in (0, step):
            used = model["used"][at : at + step]
            assert used[0] == used[1] != used[2] == used[3]
    of_indexers = {name.split(".")[2] for name in gpt["grads"] if ".indexer." in name}
    assert of_indexers == {"0", "2"}  # of layers
    assert of_indexers == {name.split(".")[2] for name in gpt["names"] if ".indexer." in name}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_model_that_cannot_share_is_refused_when_it_is_built(version: str) -> None:
    found = answer(version, "refused")
    assert found["unset"].startswith("dsa-index-sharing: ")
    assert found["length"].startswith("dsa-index-sharing: ") and "3 letters for 4" in str(
        found["length"]
    )
    assert found["first"].startswith("dsa-index-sharing: ")
    stage = "dsa-index-sharing: The DSA layers {} are Shared and use the keys of layer 1, "
    assert found["gpt"].startswith(stage.format(3))
    assert found["gpt fits"] == found.get("hybrid fits", [False, True]) == [False, True]
    if version >= "0.18":
        assert found["hybrid"].startswith(stage.format(4))
    if version >= "0.19":
        assert found["both"].startswith("dsa-index-sharing: ")
        assert found["options"].startswith(stage.format("4, 6"))


@pytest.mark.parametrize(
    ("version", "how", "shared"),
    [
        *((version, "gpt", (1, 3)) for version in VERSIONS),
        *((version, "D-DD-D", (2, 5)) for version in ("0.18.2", "0.19.2")),
    ],
)
def test_checkpoints_go_both_ways(version: str, how: str, shared: tuple[int, int]) -> None:
    found = answer(version, "checkpoints")[how]
    layers = ", ".join(f"decoder.layers.{at}.self_attention" for at in shared)
    (heard,), untouched = found["own to shared"]
    assert f"of the indexers of {layers} are left out" in heard and untouched == []
    assert found["shared to shared"] == found["own to own"] == [[], []]
    refused = f"dsa-indexer-not-saved: The checkpoint has no weights for the indexers of {layers}."
    assert found["shared to own"] == refused
    assert found["plain"] == [[heard], refused, refused, []]
    if how == "gpt":
        assert found["stacked to shared"].endswith(
            "It holds those of all layers in one tensor each."
        )


def refused(pattern: str, saved: tuple[str, ...] = (), **changes: Any) -> list[str]:
    """The errors of a launch, with the switch on where there is a pattern."""
    switch = {"CPPMEGA_INDEX_CACHE": "1", "CPPMEGA_DSA_INDEX_PATTERN": pattern}
    variables = changes.pop("variables", switch if pattern else {})
    args = {
        **{"hybrid_layer_pattern": "D-D|D-D/D-", "pipeline_model_parallel_size": 2},
        **{"num_layers": 6, "dsa_indexer_topk_freq": 1},
        **changes,
    }
    found = broken(saved=dict.fromkeys(saved, (1,)), variables=variables, **args)
    return [error.name for error in found]


GPT = {"hybrid_layer_pattern": None, "experimental_attention_variant": "dsa"}
OPTIONS = {"dsa_indexer_topk_freq": 3, "dsa_indexer_skip_topk_offset": 1}


@pytest.mark.parametrize(
    ("pattern", "changes", "name"),
    [
        ("FSFS", {}, None),
        ("FSSS", {}, "dsa-index-sharing"),
        ("FSSS", {"hybrid_layer_pattern": "D-DD-D"}, "dsa-index-sharing"),
        ("FSSS", {"hybrid_layer_pattern": "D-DD-D", "pipeline_model_parallel_size": 1}, None),
        ("FSF", {}, "dsa-index-sharing"),
        ("FSSFSS", GPT, None),
        ("FSFSFS", GPT, "dsa-index-sharing"),
        ("FSFSFS", {**GPT, "decoder_first_pipeline_num_layers": 2}, None),
        ("FSFSFS", {**GPT, **OPTIONS}, "dsa-index-sharing"),
        ("", {}, None),
        ("", {**GPT, **OPTIONS}, None),
        ("", OPTIONS, None),
        ("", {**OPTIONS, "dsa_indexer_topk_freq": 6}, "dsa-index-sharing"),
        (
            "",
            {"variables": {"CPPMEGA_DSA_INDEX_PATTERN": "FS"}},
            "dsa-index-sharing",
        ),
        ("FSFS", {"hybrid_layer_pattern": "M-"}, None),
    ],
)
def test_the_preflight_says_the_same_before_a_launch(
    pattern: str, changes: dict[str, Any], name: str | None
) -> None:
    assert refused(pattern, **changes) == ([name] if name else [])


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, []),
        ({"cuda_graph_impl": "local"}, ["unsupported"]),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, []),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "moe_router"]},
            ["unsupported"],
        ),
        # The model is a hybrid one, which has no such schedule either.
        ({"overlap_moe_expert_parallel_comm": True}, ["unsupported"] * 2),
        ({"pipeline_model_parallel_size": 3}, ["dsa-index-sharing"]),
    ],
)
def test_the_preflight_of_a_release_without_shared_keys(
    changes: dict[str, Any], names: list[str]
) -> None:
    variables = {"CPPMEGA_INDEX_CACHE": "1", "CPPMEGA_DSA_INDEX_PATTERN": "FSFS"}
    args = {"hybrid_layer_pattern": "D-DD-D", "num_layers": 6, "pipeline_model_parallel_size": 1}
    found = broken(*UP_TO_0_18, variables=variables, **args | changes)
    assert sorted(error.name for error in found) == sorted(names)


def test_the_preflight_finds_a_checkpoint_without_the_indexers_that_are_needed() -> None:
    layers = "decoder.layers.{}.self_attention.core_attention.indexer.linear_wk.weight"
    shared = tuple(layers.format(at) for at in (0, 3))
    whole = tuple(layers.format(at) for at in (0, 2, 3, 5))
    assert refused("FSFS", shared) == refused("FSFS", whole) == refused("", whole) == []
    assert refused("", shared) == refused("FSFF", shared) == ["dsa-indexer-not-saved"]
    assert refused("", ("embedding.word_embeddings.weight",)) == []
    stacked = (layers.replace("layers.{}", "layers"),)
    assert refused("", stacked, **GPT) == []
    assert refused("FSSFSS", stacked, **GPT) == ["dsa-indexer-not-saved"]
