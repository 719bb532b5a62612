"""Dropout under Transformer Engine's recomputation, with generators that share their state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cppmega.catalogue import loader as catalogue
from tests.support import patched, pristine, python
from tests.upstream_patches.recomputation import beside_pages

torch = pytest.importorskip("torch")

PAGE = "te_recompute_rng_states"
RELEASE = "transformer-engine==2.20.2"


def test_a_captured_pass_keeps_the_generators_of_its_graph() -> None:
    """A graph knows only the generators that were registered with it: none may be a copy."""
    code = f"from tests.upstream_patches.te import test_{PAGE} as test\ntest.check_capture()"
    done = python(patched(RELEASE, PAGE), code)
    assert done.returncode == 0, done.stderr


def check_capture() -> None:
    support = beside_pages("_te_modules", "te")
    te, device = support.load(), beside_pages("_generators").Generator(1, 0)
    tracker = te.CudaRNGStatesTracker()
    for capturing in (True, False):
        with support.on_cpu(te, device, capturing):
            tracker.reset()
            tracker.add("model-parallel-rng", 2)
            given = torch.ones(3, requires_grad=True)
            made = te.checkpoint(lambda x: x * 2, given, get_rng_state_tracker=lambda: tracker)
            kept = made.grad_fn.fwd_cuda_rng_state_tracker["model-parallel-rng"]
            mine = tracker.get_states()["model-parallel-rng"]
            assert (kept is mine) is capturing
            assert (made.grad_fn.fwd_cuda_rng_state.state is device.state) is capturing


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_on_a_device(reentrant: bool) -> None:
    """The generators of the device share their state, as those of the proof do."""
    for root, right in ((patched(RELEASE, PAGE), True), (pristine(RELEASE), False)):
        call = f"test.check_device({reentrant}, {right})"
        code = f"from tests.upstream_patches.te import test_{PAGE} as test\n{call}"
        done = python(root, code, fresh=True)
        assert done.returncode == 0, done.stderr


def check_device(reentrant: bool, right: bool) -> None:
    support = beside_pages("_te_modules", "te")
    te = support.load()
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 2)

    def layer(hidden: Any) -> Any:
        with tracker.fork():
            return torch.nn.functional.dropout(hidden)

    given = torch.ones(4096, device="cuda", requires_grad=True)
    options = {"use_reentrant": reentrant, "get_rng_state_tracker": lambda: tracker}
    with support.importing():
        made = te.checkpoint(layer, given, **options)
        made.sum().backward()
    assert bool(torch.equal(made, given.grad)) is right, "the masks of forward and backward"


def test_which_runs_must_reach_it() -> None:
    when = catalogue.load()[PAGE].patch.when
    run = {"fp8": "hybrid", "te_rng_tracker": True, "recompute_granularity": "full"}
    assert when is not None and when(SimpleNamespace(**run))
    assert when(SimpleNamespace(**(run | {"fp8": None, "fp4": "e2m1"})))
    for other in (
        {"fp8": None},
        {"te_rng_tracker": False},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"hybrid_layer_pattern": "M*ME"},
    ):
        assert not when(SimpleNamespace(**(run | other))), other
