"""Saves while a run trains: what a kill leaves, and what is replaced."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.recipe import index as recipes_index
from tests.support import pristine, python

CHECKS = (
    "check_a_kill_at_any_moment_leaves_a_checkpoint_that_loads",
    "check_an_asynchronous_save_is_complete_when_the_tracker_names_it",
)


@cache
def answers() -> Any:
    """What the functions of `saving_ranks` return; None for a check that holds."""
    code = f"""
    from tests.support import te_stand_ins

    te_stand_ins.before_ranks()
    from tests.training import saving_ranks

    saving_ranks.report(*{CHECKS!r})
    """
    done = python(pristine("0.19.2"), code, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.megatron
@pytest.mark.parametrize("check", CHECKS)
def test_in_megatrons_loop(check: str) -> None:
    assert answers()[check] is None, answers()[check]


@pytest.mark.parametrize("changed", [{"eval_interval": 5}, {"keep_checkpoints": 1}])
def test_a_loop_of_our_own_has_none_of_it(changed: dict[str, int]) -> None:
    with pytest.raises(CppmegaError, match="recipe-invalid"):
        recipes_index.load("smoke_cpu").with_(**changed)
