"""Dropout under Megatron's recomputation, with generators that share their state."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from cppmega.catalogue import loader as catalogue
from tests.support import patched, python
from tests.upstream_patches import one_process
from tests.upstream_patches.recomputation import beside_pages, share

torch = pytest.importorskip("torch")

PAGE = "recompute_rng_states"
RELEASE = "transformer-engine==2.20.2"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_recompute_draws_the_same_masks(version: str) -> None:
    one_process.assert_passes(PAGE, version)


@pytest.mark.megatron
def test_the_tracker_of_transformer_engine() -> None:
    call = "test.check_transformer_engine()"
    code = f"from tests.upstream_patches.recompute import test_{PAGE} as test\n{call}"
    done = python(patched(RELEASE, PAGE), code)
    assert done.returncode == 0, done.stderr


def test_which_runs_must_reach_it() -> None:
    when = catalogue.load()[PAGE].patch.when
    run = {"te_rng_tracker": True, "recompute_granularity": "full", "cuda_graph_impl": "none"}
    core = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"], "fp8": "e4m3"}
    assert when is not None and when(SimpleNamespace(**run)) and when(SimpleNamespace(**run | core))
    for other in (
        {"te_rng_tracker": False},
        {"recompute_granularity": None},
        {"fp8": "hybrid"},
        {"fp4": "e2m1"},
        core | {"recompute_modules": ["layernorm"]},
        core | {"experimental_attention_variant": "gated_delta_net"},
        {"cuda_graph_impl": "local"},
        {"hybrid_layer_pattern": "M*ME"},
    ):
        assert not when(SimpleNamespace(**(run | other))), other


def check(stock: one_process.Stock) -> None:
    from megatron.core.tensor_parallel import random

    # Other checks of this process may have put a shim in place of the methods of `random`'s class.
    unpatched = stock.module("megatron.core.tensor_parallel.random")
    with beside_pages("_generators").on_cpu(unpatched, beside_pages("_generators").Generator(1, 0)):
        tracker = unpatched.CudaRNGStatesTracker()
        tracker.use_cudagraphable_rng = True
        assert replays(random, tracker) == [True, True]
        assert replays(unpatched, tracker) == [False, False]
        check_captures(random, tracker)


def check_transformer_engine() -> None:
    sys.modules["transformer_engine"] = None  # type: ignore[assignment] # needs its extension
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs  # noqa: F401 (`random` imports it late)

    te = beside_pages("_te_modules", "te").load()
    with (
        beside_pages("_te_modules", "te").on_cpu(te, beside_pages("_generators").Generator(1, 0)),
        mock.patch.object(random, "is_graph_safe_cuda_rng_tracker", lambda _: True),
    ):
        assert replays(random, te.CudaRNGStatesTracker()) == [True, True]


def check_captures(random: Any, tracker: Any) -> None:
    """Only where states are kept and restored outside of a capture is anything rewound."""
    generators = beside_pages("_generators")
    for kept, restored in ((False, False), (False, True), (True, False), (True, True)):
        device = generators.Generator(1, 0)
        with using(random, tracker):
            with generators.on_cpu(random, device, capturing=kept):
                tracker.reset()
                tracker.add(generators.TRACKED, 2)
                mine = tracker.get_states()[generators.TRACKED]
                states = random._get_all_rng_states()
            for advanced in (device, mine):
                advanced.mask()
            known = [device.state, mine.state]
            with generators.on_cpu(random, device, capturing=restored):
                random._set_all_rng_states(*states)
            assert tracker.get_states()[generators.TRACKED] is mine
            assert device.state is known[0] and mine.state is known[1]
            offset = int(kept or restored)
            assert known == [[1, offset], [2, offset]], (kept, restored)


def replays(random: Any, tracker: Any) -> list[bool]:
    """Whether masks are those of the forward pass: `checkpoint`, `CheckpointWithoutOutput`."""
    generators = beside_pages("_generators")
    device = generators.Generator(1, 0)

    def full(layer: Any, hidden: Any) -> Any:
        return random.checkpoint(layer, False, hidden) ** 2

    def without_output(layer: Any, hidden: Any) -> Any:
        recomputed = random.CheckpointWithoutOutput(fp8=None)
        after = recomputed.checkpoint(layer, hidden) ** 2
        recomputed.discard_output_and_register_recompute(after)
        return after

    with generators.on_cpu(random, device), using(random, tracker):
        plain, *ours = (
            generators.outcome(recompute, device, tracker)
            for recompute in (lambda layer, hidden: layer(hidden) ** 2, full, without_output)
        )
    return [all(map(torch.equal, one, plain)) for one in ours]


@contextlib.contextmanager
def using(random: Any, tracker: Any) -> Iterator[None]:
    """Let Megatron use a tracker, and share storages without a compiler."""
    current = {"_CUDA_RNG_STATE_TRACKER": tracker, "_CUDA_RNG_STATE_TRACKER_INITIALIZED": True}
    with mock.patch.multiple(random, _get_share_storage=lambda: share, create=True, **current):
        yield
