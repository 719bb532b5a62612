"""A forward is found again by what is bound to it, and lives no longer."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.errors import CppmegaError
from cppmega.features.dsa import forward as dsa_forward
from cppmega.features.dsa.forward import Depths, bound, current, forward


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> Iterator[None]:
    """Exclude objects that earlier files have left from collections, which would take seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


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


# -- layers that are captured one by one ----------------------------------------------------------


class Chosen:
    """Keys, which only what holds them keeps alive."""


class Capture:
    """Megatron's capture of layers, without a GPU; `records` is what a stream would say."""

    records = True

    def full(self, chosen: Chosen, number: int = 1) -> Callable[[], Chosen]:
        """A Full layer, which keeps to the keys of its forward when it is recomputed."""

        def layer() -> Chosen:
            keys = self._keys()
            keys[number] = keys[number] if number in keys.maps[0] else chosen
            return keys[number]  # type: ignore[no-any-return]

        return layer

    def shared(self) -> Chosen:
        """A Shared layer."""
        return self._keys()[1]  # type: ignore[no-any-return]

    def _keys(self) -> ChainMap[int, Chosen]:
        here: Any = current()
        here.keys = getattr(here, "keys", None) or here.holder("keys")
        return here.keys  # type: ignore[no-any-return]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Capture]:
    graphs = SimpleNamespace(is_graph_capturing=lambda: True)
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.cuda_graphs", graphs)
    monkeypatch.setattr(dsa_forward, "_read_by_graphs", [])
    made = Capture()
    monkeypatch.setattr(dsa_forward, "_records", lambda: made.records)
    yield made
    dsa_forward._latest.clear()


def test_a_captured_layer_uses_the_latest_choice_of_its_full_layer(capture: Capture) -> None:
    first, other, second = Chosen(), Chosen(), Chosen()
    capture.full(first)()
    capture.full(other, number=3)()  # of another group of layers
    assert capture.shared() is first
    assert capture.full(second)() is second, "taken for a recomputation of the first microbatch"
    assert capture.shared() is second


def test_a_recomputation_in_a_capture_keeps_to_its_microbatch(capture: Capture) -> None:
    chosen = Chosen(), Chosen()
    layers = []
    for keys in chosen:
        layers.append((bound(capture.full(keys)), bound(capture.shared)))
        assert [layer() for layer in layers[-1]] == [keys, keys]
    for keys, (full, shared) in zip(chosen, layers, strict=True):
        assert shared() is keys and full() is keys
    assert capture.shared() is chosen[1], "a recomputation is no later choice"


def test_a_warm_up_and_a_graph_do_not_use_each_others_choices(capture: Capture) -> None:
    warm, recorded = Chosen(), Chosen()
    capture.records = False
    capture.full(warm)()
    capture.records = True
    capture.full(recorded)()
    assert capture.shared() is recorded
    capture.records = False
    assert capture.shared() is warm, "nothing has computed what is recorded"


def test_what_graphs_read_stays_and_the_rest_is_released(capture: Capture) -> None:
    alive = {}
    for name, records, is_read in (("warm", 0, 1), ("read", 1, 1), ("again", 1, 1), ("own", 1, 0)):
        capture.records = bool(records)
        chosen = Chosen()
        alive[name] = weakref.ref(chosen)
        capture.full(chosen)()
        if is_read:
            capture.shared()
        del chosen
    with forward():  # the next step
        gc.collect()
        assert [name for name, chosen in alive.items() if chosen()] == ["read", "again"]


def test_only_a_capture_does_without_a_stack(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forward() as here:
        assert current() is here, "a graph of a whole step calls the stack"
    monkeypatch.setattr(
        sys.modules["megatron.core.transformer.cuda_graphs"], "is_graph_capturing", lambda: False
    )
    assert bound(len) is len
    with pytest.raises(CppmegaError, match="dsa-layer-outside-a-stack"):
        current()
