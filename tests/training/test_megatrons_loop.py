"""Evaluation, saves and the search for missing parts, in Megatron's own loop on CPU ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.recipe import index as recipes_index
from tests.support import in_a_tree, patched, weekly

VERSION = "0.19.2"
PAGES = (
    *("own_mixers", "float16_keep_fp32", "input_embeddings", "hybrid_mtp_padding_mask"),
    *("dsa_index_share", "dsa_index_share_holder", "dsa_indexer_kernels", "dsa_attention_kernels"),
    *("mhc_connections", "linear_ce_hybrid_head", "mtp_linear_ce", "cross_entropy_fusion_linear"),
    *("grad_accumulation_without_apex", "mtp_roll_packed_sequences", "mtp_per_token_counts"),
    *("fully_reshardable_bucket_padding", "log_second_line", "grad_checks_no_host_sync"),
    *("async_save_host_copies", "absorbed_mla_gathered_weight"),
)
CHECKS = {
    "evaluation": (
        "check_training_is_the_same_to_the_bit_and_so_are_the_samples",
        "check_a_resumed_run_is_evaluated_on_the_same_samples",
        "check_ranks_that_share_heads_are_evaluated_as_one_rank",
        "check_ranks_that_share_sequences_are_evaluated_as_one_rank",
    ),
    "saving": (
        "check_a_kill_at_any_moment_leaves_a_checkpoint_that_loads",
        "check_an_asynchronous_save_is_complete_when_the_tracker_names_it",
        "check_a_process_that_dies_before_it_has_written_stops_the_run",
        "check_what_a_rank_starts_ends_with_it",
    ),
    "streams": (
        "check_streams_packs_and_linear_heads_go_together",
        "check_four_ranks_of_streams_train_as_one",
        "check_a_killed_run_of_four_ranks_goes_on_to_the_bit",
    ),
    "completeness": (
        "check_a_whole_model_trains",
        "check_gradients_that_are_added_in_products_are_the_same",
        "check_the_load_of_experts_is_logged",
        "check_a_model_of_other_sizes_does_not_take_a_step",
        "check_what_no_loss_reaches_is_named",
        "check_a_module_that_is_read_without_a_call_is_named",
        "check_structure_that_is_the_same_everywhere_is_named",
    ),
}
WEEKLY = {
    "check_four_ranks_of_streams_train_as_one",
    "check_a_killed_run_of_four_ranks_goes_on_to_the_bit",
}
"""A third of the ranks of all: one and two ranks do each of it with other models in every run."""
NAMES = [name for names in CHECKS.values() for name in names]


@cache
def answers() -> Any:
    """What the functions of the modules `..._ranks` return; None for a check that holds."""
    modules = [f"training.{name}_ranks" for name in CHECKS]
    names = [name for name in NAMES if weekly.NOW or name not in WEEKLY]
    return in_a_tree.kept(
        *("megatrons-loop", patched(VERSION, *PAGES), modules, names),
        before=in_a_tree.BEFORE,
        env={"CPPMEGA_INDEX_CACHE": "1"},
    )


@pytest.mark.megatron
@pytest.mark.parametrize("check", weekly.mostly_weekly(NAMES, *{*NAMES} - WEEKLY))
def test_in_megatrons_loop(check: str) -> None:
    assert answers()[check] is None, answers()[check]


@pytest.mark.parametrize("changed", [{"eval_interval": 5}, {"keep_checkpoints": 1}])
def test_a_loop_of_our_own_has_none_of_it(changed: dict[str, int]) -> None:
    with pytest.raises(CppmegaError, match="recipe-invalid"):
        recipes_index.load("smoke_cpu").with_(**changed)
