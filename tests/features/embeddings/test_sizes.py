"""Sizes of further input embeddings: how ranks get them, and what they do not go with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cppmega.errors import CppmegaError
from cppmega.features.embeddings import sizes
from cppmega.recipe import index as recipes_index
from cppmega.recipe.recipe import NgramHash, Structure
from cppmega.recipe.render import missing, render
from cppmega.training import requirements

SMALL = NgramHash((2, 3), 2, (89, 97, 101, 103), dim=4, seed=7)
PLAIN = recipes_index.load("nam56r_h200_slice")


def test_ranks_read_what_the_recipe_states() -> None:
    recipe = PLAIN.with_(ngram_hash=SMALL, structure=Structure(levels=7))
    environment = dict(render(recipe, "0.19.2").environment)
    assert sizes.ngram_hash(environment) == SMALL
    assert sizes.structure(environment) == Structure(levels=7)
    without = dict(render(PLAIN, "0.19.2").environment)
    assert sizes.ngram_hash(without) is sizes.structure(without) is None
    assert sizes.asked_for(environment) and not sizes.asked_for(without)
    requirements.check_gates(recipe, environment)
    for field, other in (("ngram_hash", NgramHash()), ("structure", Structure(levels=8))):
        for changed in (recipe.with_(**{field: other}), recipe.with_(**{field: None})):
            with pytest.raises(CppmegaError, match=f"CPPMEGA_{field.upper()}") as caught:
                requirements.check_gates(changed, environment)
            assert caught.value.name == "variable-differs"


@pytest.mark.parametrize(
    "text", ["1", '{"heads": 0}', '{"heads": 2}', '{"orders": [2], "heads": 1, "tables": []}', "{"]
)
def test_a_text_without_sense_is_refused(text: str) -> None:
    with pytest.raises(CppmegaError) as caught:
        sizes.asked_for({"CPPMEGA_NGRAM_HASH": text})
    assert caught.value.name == "sizes-misstated"
    with pytest.raises(CppmegaError, match="CPPMEGA_STRUCTURE"):
        sizes.asked_for({"CPPMEGA_STRUCTURE": '{"levels": "many"}'})


def test_older_releases_say_which_one_has_them() -> None:
    recipe = PLAIN.with_(ngram_hash=SMALL, structure=Structure())
    assert not missing(recipe, "0.19.2")
    gaps = [gap for gap in missing(recipe, "0.18.2") if gap.part.endswith("embedding")]
    assert [gap.part for gap in gaps] == ["n-gram hash embedding", "structure embedding"]
    assert all("0.19.2" in gap.reason and "0.18.2" in gap.reason for gap in gaps)


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
        requirements.check_arguments(PLAIN.with_(structure=Structure()), None, args)  # type: ignore[arg-type]
    assert caught.value.name == "input-embeddings-not-supported"
    assert not list(sizes.obstacles(SimpleNamespace(cuda_graph_impl="local", mtp_num_layers=2)))
