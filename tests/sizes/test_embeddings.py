"""Sizes of further input embeddings: how ranks get them, and what they do not go with."""

from __future__ import annotations

import pytest

from cppmega.errors import CppmegaError
from cppmega.recipe import index as recipes_index
from cppmega.recipe.recipe import NgramHash, Structure
from cppmega.recipe.render import missing, render
from cppmega.sizes import embeddings as sizes
from cppmega.training.requirements import Start

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
    Start(recipe, environ=environment).check("variables")
    for field, other in (("ngram_hash", NgramHash()), ("structure", Structure(levels=8))):
        for changed in (recipe.with_(**{field: other}), recipe.with_(**{field: None})):
            with pytest.raises(CppmegaError, match=f"CPPMEGA_{field.upper()}") as caught:
                Start(changed, environ=environment).check("variables")
            assert caught.value.name == "recipe-differs"


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
