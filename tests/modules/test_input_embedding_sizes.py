"""Sizes of further input embeddings: how ranks get them, and what they do not go with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cppmega.errors import CppmegaError
from cppmega.modules import input_embedding_sizes as sizes
from cppmega.recipe import index as recipes_index
from cppmega.recipe.recipe import NgramHash
from cppmega.recipe.render import missing, render
from cppmega.training import requirements

SMALL = NgramHash((2, 3), 2, (89, 97, 101, 103), dim=4, seed=7)
PLAIN = recipes_index.load("nam56r_h200_slice")


def test_ranks_read_what_the_recipe_states() -> None:
    recipe = PLAIN.with_(ngram_hash=SMALL)
    environment = dict(render(recipe, "0.19.2").environment)
    assert sizes.ngram_hash(environment) == SMALL
    assert sizes.ngram_hash(dict(render(PLAIN, "0.19.2").environment)) is None
    assert not sizes.asked_for({})
    requirements.check_gates(recipe, environment)
    for other in (PLAIN, recipe.with_(ngram_hash=NgramHash())):
        with pytest.raises(CppmegaError, match="CPPMEGA_NGRAM_HASH") as caught:
            requirements.check_gates(other, environment)
        assert caught.value.name == "variable-differs"


@pytest.mark.parametrize(
    "text", ["1", '{"heads": 0}', '{"heads": 2}', '{"orders": [2], "heads": 1, "tables": []}', "{"]
)
def test_a_text_without_sense_is_refused(text: str) -> None:
    with pytest.raises(CppmegaError) as caught:
        sizes.asked_for({"CPPMEGA_NGRAM_HASH": text})
    assert caught.value.name == "input-embeddings-misstated"


def test_older_releases_say_which_one_has_them() -> None:
    recipe = PLAIN.with_(ngram_hash=SMALL)
    assert not missing(recipe, "0.19.2")
    (gap,) = (gap for gap in missing(recipe, "0.18.2") if "n-gram" in gap.part)
    assert "0.19.2" in gap.reason and "0.18.2" in gap.reason


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"context_parallel_size": 2}, "context parallelism"),
        ({"use_megatron_fsdp": True}, "FSDP"),
        ({"use_torch_fsdp2": True}, "FSDP"),
        ({"use_mup": True}, "MuP"),
        ({"overlap_moe_expert_parallel_comm": True}, "overlap-moe"),
        ({"cuda_graph_impl": "full_iteration"}, "full_iteration"),
        ({"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|tmL"}, "layout"),
        ({"init_model_with_meta_device": True}, "meta device"),
    ],
)
def test_what_is_not_supported_is_refused_before_the_model_is_built(
    arguments: dict[str, object], said: str
) -> None:
    args = SimpleNamespace(**arguments)
    with pytest.raises(CppmegaError, match=said) as caught:
        requirements.check_arguments(PLAIN.with_(ngram_hash=SMALL), None, args)  # type: ignore[arg-type]
    assert caught.value.name == "input-embeddings-not-supported"
    assert not list(sizes.obstacles(SimpleNamespace(cuda_graph_impl="local", mtp_num_layers=2)))
