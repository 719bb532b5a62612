"""Which DSA layers share keys is said by their order; real models of both kinds, on the CPU."""

from __future__ import annotations

import json
from argparse import Namespace
from functools import cache
from typing import Any

import pytest

from tests.support import patched, pristine, python
from tests.upstream_patches.dsa_layers import patch_of

PAGES = ("dsa_index_share", "dsa_index_share_checkpoints")


@cache
def answers(version: str, what: str) -> dict[str, Any]:
    root = pristine(version) if what == "stock" else patched(version, *PAGES)
    done = python(root, f"from tests.upstream_patches import dsa_sharing as t; t.main({what!r})")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_pattern_trains_as_the_same_options_on_stock_to_the_bit() -> None:
    stock, mine = answers("0.19.2", "stock"), answers("0.19.2", "kinds")
    assert mine["gpt"] == mine["options"] == stock["gpt"]
    assert mine["hybrid"] == stock["hybrid"]  # D at 1, 3, 4, 6, and one of an MTP depth


def test_shared_layers_use_the_full_layers_keys_and_own_no_indexer() -> None:
    gpt, hybrid = (answers("0.19.2", "kinds")[how] for how in ("gpt", "hybrid"))
    assert gpt["kinds"] == [False, True, False, True]
    assert hybrid["kinds"] == [False, True, False, True, False]
    for model in (gpt, hybrid):
        step = len(model["kinds"])
        assert len(model["used"]) == 2 * step  # training, and evaluation
        for at in (0, step):
            used = model["used"][at : at + step]
            assert used[0] == used[1] != used[2] == used[3]
    of_indexers = {name.split(".")[2] for name in gpt["grads"] if ".indexer." in name}
    assert of_indexers == {"0", "2"}  # of layers
    assert of_indexers == {name.split(".")[2] for name in gpt["names"] if ".indexer." in name}


def test_a_model_that_cannot_share_is_refused_when_it_is_built() -> None:
    found = answers("0.19.2", "refused")
    assert found["unset"].startswith("dsa-index-share-unset: ")
    assert found["length"].startswith("dsa-index-pattern-invalid: ") and "3 letters for 4" in str(
        found["length"]
    )
    assert found["first"].startswith("dsa-index-pattern-invalid: ")
    assert found["both"].startswith("dsa-index-share-conflict: ")
    stage = "dsa-index-share-stage: The DSA layers {} are Shared and use the keys of layer 1, "
    assert found["gpt"].startswith(stage.format(3))
    assert found["hybrid"].startswith(stage.format(4))
    assert found["options"].startswith(stage.format("4, 6"))
    assert found["gpt fits"] == found["hybrid fits"] == [False, True]


@pytest.mark.parametrize(("how", "shared"), [("gpt", (1, 3)), ("hybrid", (2, 5))])
def test_checkpoints_go_both_ways(how: str, shared: tuple[int, int]) -> None:
    found = answers("0.19.2", "round trips")[how]
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
    """The errors of both pages for a launch, with the switch on where there is a pattern."""
    switch = {"CPPMEGA_INDEX_CACHE": "1", "CPPMEGA_DSA_INDEX_PATTERN": pattern}
    args = {
        **{"hybrid_layer_pattern": "D-D|D-D/D-", "pipeline_model_parallel_size": 2},
        **{
            "num_layers": 6,
            "dsa_indexer_topk_freq": 1,
            "cppmega_variables": switch if pattern else {},
        },
        **changes,
    }
    pages = [patch_of(page) for page in PAGES if page != "dsa_index_share" or pattern]
    shapes = dict.fromkeys(saved, (1,))
    return [
        e.name for page in pages if page.refuses for e in page.refuses(Namespace(**args), shapes)
    ]


GPT = {"hybrid_layer_pattern": None, "experimental_attention_variant": "dsa"}
OPTIONS = {"dsa_indexer_topk_freq": 3, "dsa_indexer_skip_topk_offset": 1}


@pytest.mark.parametrize(
    ("pattern", "changes", "name"),
    [
        ("FSFS", {}, None),
        ("FSSS", {}, "dsa-index-share-stage"),
        ("FSSS", {"hybrid_layer_pattern": "D-DD-D"}, "dsa-index-share-stage"),
        ("FSSS", {"hybrid_layer_pattern": "D-DD-D", "pipeline_model_parallel_size": 1}, None),
        ("FSF", {}, "dsa-index-pattern-invalid"),
        ("FSSFSS", GPT, None),
        ("FSFSFS", GPT, "dsa-index-share-stage"),
        ("FSFSFS", {**GPT, "decoder_first_pipeline_num_layers": 2}, None),
        ("FSFSFS", {**GPT, **OPTIONS}, "dsa-index-share-conflict"),
        ("", {}, None),
        ("", {**GPT, **OPTIONS}, None),
        ("", OPTIONS, None),
        ("", {**OPTIONS, "dsa_indexer_topk_freq": 6}, "dsa-index-share-stage"),
        (
            "",
            {"cppmega_variables": {"CPPMEGA_DSA_INDEX_PATTERN": "FS"}},
            "dsa-index-pattern-ignored",
        ),
        ("FSFS", {"hybrid_layer_pattern": "M-"}, None),
    ],
)
def test_the_preflight_says_the_same_before_a_launch(
    pattern: str, changes: dict[str, Any], name: str | None
) -> None:
    assert refused(pattern, **changes) == ([name] if name else [])


def test_the_switch_is_refused_on_a_release_without_shared_keys() -> None:
    args = Namespace(hybrid_layer_pattern="D-D", num_layers=3, pipeline_model_parallel_size=1)
    args.cppmega_variables = {"CPPMEGA_INDEX_CACHE": "1", "CPPMEGA_DSA_INDEX_PATTERN": "FS"}
    page = patch_of("dsa_index_share_checkpoints")
    assert page.refuses is not None
    assert [e.name for e in page.refuses(args, {})] == ["dsa-index-share-not-in-release"]


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
