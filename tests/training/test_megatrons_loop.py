"""Evaluation, saves and the search for missing parts, in Megatron's own loop on CPU ranks."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.recipe import index as recipes_index
from tests.support import made_once, patched, python

VERSION = "0.19.2"
PAGES = (
    *("own_mixers", "float16_keep_fp32", "input_embeddings", "hybrid_mtp_padding_mask"),
    *("dsa_index_share", "dsa_index_share_holder", "dsa_indexer_kernels", "dsa_attention_kernels"),
    *("mtp_roll_packed_sequences", "fully_reshardable_bucket_padding"),
)
CHECKS = {
    "evaluation": (
        "check_training_is_the_same_to_the_bit_and_so_are_the_samples",
        "check_a_resumed_run_is_evaluated_on_the_same_samples",
    ),
    "saving": (
        "check_a_kill_at_any_moment_leaves_a_checkpoint_that_loads",
        "check_an_asynchronous_save_is_complete_when_the_tracker_names_it",
    ),
    "completeness": (
        "check_a_whole_model_trains",
        "check_a_model_of_other_sizes_does_not_take_a_step",
        "check_what_no_loss_reaches_is_named",
        "check_structure_that_is_the_same_everywhere_is_named",
    ),
}
NAMES = [name for names in CHECKS.values() for name in names]


@cache
def answers() -> Any:
    """What the functions of the modules `..._ranks` return; None for a check that holds."""
    with made_once("megatrons-loop.json") as (file, missing):
        if missing:
            file.write_text(_printed())
    return json.loads(file.read_text())


def _printed() -> str:
    code = f"""
    from tests.support import te_stand_ins

    te_stand_ins.before_ranks()
    from tests.training import completeness_ranks, evaluation_ranks, saving_ranks
    from tests.upstream_patches import forked_ranks

    checks = vars(evaluation_ranks) | vars(saving_ranks) | vars(completeness_ranks)
    forked_ranks.report(checks, {NAMES!r})
    """
    done = python(patched(VERSION, *PAGES), code, env={"CPPMEGA_INDEX_CACHE": "1"}, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.megatron
@pytest.mark.parametrize("check", NAMES)
def test_in_megatrons_loop(check: str) -> None:
    assert answers()[check] is None, answers()[check]


@pytest.mark.parametrize("changed", [{"eval_interval": 5}, {"keep_checkpoints": 1}])
def test_a_loop_of_our_own_has_none_of_it(changed: dict[str, int]) -> None:
    with pytest.raises(CppmegaError, match="recipe-invalid"):
        recipes_index.load("smoke_cpu").with_(**changed)
