"""Mamba-3 layers in hybrid models: against stock, one rank, and documents alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support import in_a_tree, patched, pristine

VERSION = "0.19.2"
PAGES = (
    *("own_mixers", "float16_keep_fp32", "fully_reshardable_bucket_padding"),
    *("mtp_roll_packed_sequences", "mtp_per_token_counts"),
)
CHECKS = (
    "check_layouts_train_as_one_rank",
    "check_small_parameters_stay_fp32_and_resume_to_the_bit",
    "check_documents_of_a_pack_do_not_see_each_other",
    "check_parameters_are_read_in_calls_of_their_modules",
    "check_what_is_refused_when_a_model_is_built",
    "check_a_checkpoint_of_the_other_definition_is_not_loaded",
)


ASKED = (*CHECKS, "rows_without")
MODULE = "upstream_patches.mamba.own_mixer_ranks"


@cache
def answers() -> Any:
    """What the functions of `own_mixer_ranks` return; None for a check that holds."""
    return in_a_tree.kept("own-mixers", patched(VERSION, *PAGES), MODULE, ASKED)


@pytest.mark.megatron
@pytest.mark.parametrize("check", CHECKS)
def test_with_the_mixers(check: str) -> None:
    assert answers()[check] is None, answers()[check]


@pytest.mark.megatron
def test_without_sizes_training_is_stocks_to_the_bit() -> None:
    (stock,) = in_a_tree.asked(pristine(VERSION), MODULE, ["rows_without"]).values()
    assert stock and isinstance(stock, list), stock
    assert answers()["rows_without"] == stock
