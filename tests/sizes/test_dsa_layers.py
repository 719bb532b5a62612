"""Kinds of DSA layers: a pattern, Megatron's options, and the stages that they allow."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cppmega.errors import CppmegaError
from cppmega.sizes import dsa_layers as kinds

NAM56R = [5, 9, 13, 21, 25, 29, 37, 41, 45]
LAYERS = st.sets(st.integers(1, 60), min_size=1, max_size=12).map(sorted)


def test_nam56r_is_said_in_both_ways() -> None:
    wanted = {5: 5, 9: 5, 13: 5, 21: 21, 25: 21, 29: 21, 37: 37, 41: 37, 45: 37}
    assert kinds.from_pattern("FSSFSSFSS", NAM56R) == wanted
    assert kinds.from_options(16, 5, NAM56R) == wanted
    assert kinds.decide("FSSFSSFSS", 16, 5, NAM56R) == wanted
    assert kinds.dsa_layers("--D-D", before=10) == [13, 15]


@given(LAYERS, st.data())
def test_a_shared_layer_uses_the_last_full_one_before_it(
    layers: list[int], data: st.DataObject
) -> None:
    rest = data.draw(st.text("FS", min_size=len(layers) - 1, max_size=len(layers) - 1))
    sources = kinds.from_pattern(f"F{rest}", layers)
    for letter, number in zip(f"F{rest}", layers, strict=True):
        full = [at for at in layers if at <= number and sources[at] == at]
        assert sources[number] == full[-1] and (letter == "F") == (sources[number] == number)


@given(LAYERS, st.text("FSX", max_size=14))
def test_any_other_pattern_is_refused(layers: list[int], pattern: str) -> None:
    assume(set(pattern) - set("FS") or len(pattern) != len(layers) or pattern[0] != "F")
    with pytest.raises(CppmegaError, match="dsa-index-sharing"):
        kinds.from_pattern(pattern, layers)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 40))
def test_options_are_megatrons(frequency: int, offset: int, last: int) -> None:
    """The definition of `is_dsa_skip_topk_layer` and `source_dsa_compute_layer`, step by step."""
    sources = kinds.from_options(frequency, offset, range(1, last + 1))
    computing = {*range(1, max(offset, 1) + 1), *range(max(offset, 1), last + 1, frequency)}
    for number, source in sources.items():
        assert source == max(at for at in computing if at <= number)


@given(LAYERS, st.data())
def test_a_stage_is_refused_where_it_begins_with_a_shared_layer(
    layers: list[int], data: st.DataObject
) -> None:
    rest = data.draw(st.text("FS", min_size=len(layers) - 1, max_size=len(layers) - 1))
    sources = kinds.from_pattern(f"F{rest}", layers)
    at = data.draw(st.integers(0, len(layers)))
    for stage in (layers[:at], layers[at:]):
        if not stage or sources[stage[0]] == stage[0]:
            kinds.check_stage(sources, stage)
            continue
        with pytest.raises(CppmegaError, match=f"DSA layers {stage[0]}") as caught:
            kinds.check_stage(sources, stage)
        assert caught.value.name == "dsa-index-sharing"
        assert f"use the keys of layer {sources[stage[0]]}, which another" in caught.value.what


def test_options_whose_source_is_no_dsa_layer_are_refused() -> None:
    sources = kinds.from_options(4, 2, [3, 6])
    with pytest.raises(CppmegaError, match=r"3 are Shared .* layer 2, which is not a DSA layer"):
        kinds.check_stage(sources, [3, 6])


def test_pattern_and_options_must_agree() -> None:
    with pytest.raises(CppmegaError, match=r"makes the layers 1, 3 Full; .* makes it 1, 2, 4"):
        kinds.decide("FSFS", 2, 2, [1, 2, 3, 4])


def test_a_switch_that_nothing_explains_is_refused() -> None:
    assert kinds.decide("", 1, 0, [1, 2]) == {1: 1, 2: 2}
    assert kinds.decide("", 2, 1, [1, 2], asked=True) == {1: 1, 2: 1}
    with pytest.raises(CppmegaError, match="dsa-index-sharing") as caught:
        kinds.decide("", 1, 0, [1, 2], asked=True)
    assert "CPPMEGA_DSA_INDEX_PATTERN=FS " in caught.value.next
