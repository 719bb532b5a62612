"""Experts without a token: a router's choice where they are few, and refused otherwise."""

from __future__ import annotations

import pytest

from cppmega.errors import CppmegaError
from cppmega.training.completeness import refuse_unseen

GROUPED = "decoder.layers.3.mlp.experts.linear_fc{}.weight{}"
SEQUENTIAL = "decoder.layers.3.mlp.experts.local_experts.{1}.linear_fc{0}.weight"


def unseen(pattern: str, *numbers: int) -> list[tuple[str, bool]]:
    return [(pattern.format(layer, number), True) for number in numbers for layer in (1, 2)]


@pytest.mark.parametrize("pattern", [GROUPED, SEQUENTIAL])
def test_few_idle_experts_are_returned(pattern: str) -> None:
    ranks = [((0, 0, 0), unseen(pattern, 1, 3)), ((0, 0, 1), unseen(pattern, 3))]
    assert len(refuse_unseen(ranks, 8)) == 6  # three experts of eight, of two products each


@pytest.mark.parametrize("pattern", [GROUPED, SEQUENTIAL])
def test_half_of_the_experts_are_refused(pattern: str) -> None:
    ranks = [((0, 0, 0), unseen(pattern, 1, 3)), ((0, 0, 1), unseen(pattern, 0, 3))]
    with pytest.raises(CppmegaError, match="8 parameters had no gradient"):
        refuse_unseen(ranks, 8)


def test_what_all_experts_share_is_refused() -> None:
    together = [(f"decoder.layers.3.mlp.experts.weight{number}", True) for number in (1, 2)]
    with pytest.raises(CppmegaError, match="2 parameters had no gradient"):
        refuse_unseen([((0, 0, 0), together)], 8)


def test_other_parameters_are_refused_alone() -> None:
    ranks = [((0, 0, 0), [("decoder.layers.3.mlp.router.weight", False), *unseen(GROUPED, 5)])]
    with pytest.raises(CppmegaError, match=r"1 parameters had .*router") as refused:
        refuse_unseen(ranks, 8)
    assert "experts" not in refused.value.what
    assert refuse_unseen([((0, 0, 0), []), ((0, 0, 0), unseen(GROUPED, 5))], 8) == []
