"""A forward is found again by what is bound to it, and lives no longer."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from cppmega.errors import CppmegaError
from cppmega.modules.dsa_forward import Depths, bound, current, forward


def test_a_bound_function_finds_its_forward_later_and_in_another_thread() -> None:
    with forward() as first:
        again = bound(current)
    with forward() as second:
        assert current() is second and again() is first
        thread = threading.Thread(target=lambda: seen.append(again()))
        seen: list[object] = []
        thread.start()
        thread.join()
    assert seen == [first]


def test_nothing_is_bound_outside_a_forward_and_no_layer_runs_there() -> None:
    assert bound(len) is len
    with pytest.raises(CppmegaError) as error:
        current()
    assert error.value.name == "dsa-layer-outside-a-stack"


def test_a_forward_ends_with_an_error_and_with_what_is_bound_to_it() -> None:
    def fail() -> None:
        with forward() as here:
            held.append(bound(current))
            alive.append(weakref.ref(here))
            raise ValueError

    held: list[object] = []
    alive: list[weakref.ref[object]] = []
    with pytest.raises(ValueError):
        fail()
    with pytest.raises(CppmegaError):
        current()
    gc.collect()
    assert alive[0]() is not None
    held.clear()
    gc.collect()
    assert alive[0]() is None


def test_a_depth_finds_what_earlier_ones_keep_and_overwrites_nothing() -> None:
    depths = Depths()

    def keep(key: int, value: str) -> dict[int, str]:
        here = current()
        here.kept = here.holder("kept")  # type: ignore[attr-defined]
        here.kept[key] = value  # type: ignore[attr-defined]
        with forward() as stack:  # a hybrid depth is a stack itself
            assert stack is here
        return dict(here.kept)  # type: ignore[attr-defined]

    with forward():
        assert depths.next(keep)(1, "first") == {1: "first"}
        assert depths.next(keep)(1, "second") == {1: "second"}
        assert depths.next(keep)(2, "third") == {1: "second", 2: "third"}
        assert not hasattr(current(), "kept")
