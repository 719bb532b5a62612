"""Errors: their parts, and the suggestion for a misspelled word."""

from __future__ import annotations

import pickle

import pytest

from cppmega.errors import CppmegaError, closest, did_you_mean, suggestion


def test_a_misspelled_word_is_answered_with_the_closest_known_ones() -> None:
    known = ["forward", "forwards", "backward"]
    assert did_you_mean("forwrad", known) == " Did you mean forward?"
    assert (
        did_you_mean("forwar", known, 2)
        == f" Did you mean {' or '.join(closest('forwar', known, 2))}?"
    )
    assert closest("CPPMEGA_RUN", ["CPPMEGA_RUNS", "CPPMEGA_ROOT"]) == ["CPPMEGA_RUNS"]
    assert closest("CPMEGA_RUNS", ["CPPMEGA_RUNS"]) == ["CPPMEGA_RUNS"]
    for word in ("CPPMEGA_FOO", "CPPMEGA_CASE", "--foo"):
        assert closest(word, ["CPPMEGA_ROOT", "CPPMEGA_RUN", "CPPMEGA_CACHE", "--fp8"]) == []
    assert did_you_mean("xyz", known) == suggestion([]) == ""


def test_an_error_survives_pickling() -> None:
    error = CppmegaError("made-up", "what", "why", "next")
    copy = pickle.loads(pickle.dumps(error))
    assert copy.render() == error.render() and copy.as_json() == error.as_json()


def test_an_error_keeps_its_parts_where_its_type_is_raised_with_its_message_alone() -> None:
    error = CppmegaError("bad-size", "It is 3.", "It must be 4.", "give 4")
    with pytest.raises(CppmegaError) as caught:
        try:
            raise error
        except Exception as found:  # as Megatron's build_module does it
            raise type(found)(f"{found} when instantiating Layer") from None
    assert caught.value.as_json() == error.as_json()


def test_an_error_name_is_kebab_case() -> None:
    with pytest.raises(ValueError, match="kebab-case"):
        CppmegaError("Made up", "what", "why", "next")
