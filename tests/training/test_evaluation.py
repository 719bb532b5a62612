"""Evaluation on held-out data while a run trains."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests.support import made_once, patched, python

VERSION = "0.19.2"
PAGES = (
    *("own_mixers", "float16_keep_fp32", "input_embeddings", "hybrid_mtp_padding_mask"),
    *("dsa_index_share", "dsa_index_share_holder", "dsa_indexer_kernels", "dsa_attention_kernels"),
    *("mtp_roll_packed_sequences", "fully_reshardable_bucket_padding"),
)
CHECKS = (
    "check_training_is_the_same_to_the_bit_and_so_are_the_samples",
    "check_a_resumed_run_is_evaluated_on_the_same_samples",
)


@cache
def answers() -> Any:
    """What the functions of `evaluation_ranks` return; None for a check that holds."""
    with made_once("evaluation.json") as (file, missing):
        if missing:
            file.write_text(_printed())
    return json.loads(file.read_text())


def _printed() -> str:
    code = f"""
    from tests.support import te_stand_ins

    te_stand_ins.before_ranks()
    from tests.training import evaluation_ranks

    evaluation_ranks.report(*{CHECKS!r})
    """
    done = python(patched(VERSION, *PAGES), code, env={"CPPMEGA_INDEX_CACHE": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.megatron
@pytest.mark.parametrize("check", CHECKS)
def test_in_megatrons_loop(check: str) -> None:
    assert answers()[check] is None, answers()[check]
