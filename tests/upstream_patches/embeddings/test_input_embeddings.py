"""N-gram and structure embeddings in models: against stock, one rank, and documents alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from cppmega.recipe.arithmetic import flops, parameters
from cppmega.recipe.recipe import NgramHash, Recipe, Structure
from tests.support import in_a_tree, patched, pristine

VERSION = "0.19.2"
PAGES = (
    "input_embeddings",
    # Without these a padded pack is shifted wrongly, context-parallel ranks weigh tokens by their
    # own counts, and a checkpoint of two stages is cut short.
    "mtp_roll_packed_sequences",
    "mtp_per_token_counts",
    "fully_reshardable_bucket_padding",
)
CHECKS = (
    "check_an_untrained_model_is_the_one_without",
    "check_layouts_train_as_one_rank",
    "check_sharded_states_and_a_checkpoint_of_two_stages",
    "check_a_checkpoint_of_other_multipliers_is_refused",
    "check_what_a_token_is_embedded_as",
    "check_a_model_that_is_not_fed_stops",
    "check_parameters_are_read_in_calls_of_their_modules",
)
ASKED = (*CHECKS, "rows_without", "counted")


MODULE = "upstream_patches.embeddings.input_embedding_ranks"


@cache
def answers() -> Any:
    """What the functions of `input_embedding_ranks` return; None for a check that holds."""
    return in_a_tree.kept("input-embeddings", patched(VERSION, *PAGES), MODULE, ASKED)


@pytest.mark.megatron
@pytest.mark.parametrize("check", CHECKS)
def test_with_the_embeddings(check: str) -> None:
    assert answers()[check] is None, answers()[check]


@pytest.mark.megatron
def test_without_the_switch_training_is_stocks_to_the_bit() -> None:
    (stock,) = in_a_tree.asked(pristine(VERSION), MODULE, ["rows_without"]).values()
    assert set(stock) == {"gpt", "hybrid"}, stock
    assert answers()["rows_without"] == stock


@pytest.mark.megatron
def test_what_is_built_is_what_the_recipe_counts() -> None:
    """The difference that the embeddings make to a model of width 32 with two depths."""
    recipe = Recipe(
        name="counted",
        purpose="the embeddings of the model that was built",
        kind="hybrid",
        precision="bf16",
        gpus=1,
        pattern="-/-/-",
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        seq_length=32,
        vocab_size=128,
    )
    whole = recipe.with_(
        ngram_hash=NgramHash((2, 3), 2, (389, 397, 401, 409), dim=8),
        structure=Structure(bottleneck=6),
    )
    assert answers()["counted"] == {
        "parameters": parameters(whole).total - parameters(recipe).total,
        "flops": flops(whole) - flops(recipe),
    }
