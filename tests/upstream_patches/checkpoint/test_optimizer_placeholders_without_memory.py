"""A state loaded by an optimizer that allocates its state itself: held once, at every moment."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest import mock

import pytest

from tests.upstream_patches import one_process

torch = pytest.importorskip("torch")

PAGE = "optimizer_placeholders_without_memory"


@pytest.mark.megatron
@pytest.mark.parametrize("version", one_process.PAGES[PAGE])
def test_loaded_state(version: str) -> None:
    one_process.assert_passes(PAGE, version)


def check(stock: one_process.Stock) -> None:
    from megatron.core import optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer

    from cppmega.proof import cpu_shims
    from tests.upstream_patches.optimizer import distributed_optimizer as small

    cpu_shims.init_distributed()
    patched = distrib_optimizer.DistributedOptimizer.load_state_dict
    stock_module = stock.module(distrib_optimizer.__name__)
    unpatched = stock_module.DistributedOptimizer.load_state_dict

    class Allocates(small.Adam):
        """Adam that, like Transformer Engine's, copies what it is given to memory of its own."""

        given: list[int]  # elements of memory in what it is to copy, by load

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            states = dict(self.state)
            self.given = [*getattr(self, "given", ()), held(states)]
            for parameter, values in states.items():
                self.state[parameter] = {}
                for name, value in values.items():
                    self.set_scaled_state(parameter, name, value)

        def set_scaled_state(self, parameter: Any, name: str, value: Any) -> None:
            state = self.state[parameter]
            state.setdefault(name, torch.zeros_like(parameter)).copy_(value)

    def resumed(saved: Any, load: Any) -> Any:
        """Return a new run that loads the state of `saved` by the method `load`.

        As Megatron does: once, so that there is a state to read into, and again after reading.
        """
        run = small.Run(1, lr=0.1)
        run.model.load_state_dict(saved.model.state_dict())
        with mock.patch.object(distrib_optimizer.DistributedOptimizer, "load_state_dict", load):
            run.optimizer.load_state_dict(deepcopy(saved.optimizer.state_dict()))
            read(saved, run)
            run.optimizer.load_state_dict(deepcopy(saved.optimizer.state_dict()))
        return run

    def read(saved: Any, run: Any) -> None:
        """Copy every value into the tensors that the optimizer of `run` has."""
        states = saved.states()
        for name, parameter in run.model.named_parameters():
            mine = run.inner._get_main_param_and_optimizer_states(parameter)
            for key, value in mine.items():
                value.copy_(states[name][key].view(-1))

    with small.on_cpu(), mock.patch.object(stock_module, "HAVE_APEX_OR_TE", True):
        for kind in (small.Adam, Allocates):
            with (
                mock.patch.object(optimizers, "Adam", kind),
                mock.patch.object(distrib_optimizer, "Adam", kind),
            ):
                saved = small.Run(0, lr=0.1)
                for step in range(3):
                    saved.step(step)
                ours, theirs = resumed(saved, patched), resumed(saved, unpatched)
                assert type(ours.inner.optimizer) is kind
                tensors, elements = 2 * 8, held(saved.inner.optimizer.state)
                if kind is Allocates:
                    # The first load is that of an empty state, when the optimizer is made.
                    assert ours.inner.optimizer.given == [0, tensors, 0]
                    assert theirs.inner.optimizer.given == [0, elements, elements]
                for run in (ours, theirs):  # and no moment shares memory with another
                    assert held(run.inner.optimizer.state) == elements
                for run in (saved, ours, theirs):
                    run.step(3)
                small.assert_equal(ours, saved)
                small.assert_equal(theirs, saved)


def held(states: Any) -> int:
    """Return how many elements of memory the tensors of an optimizer's state have, all together."""
    tensors = [value for values in states.values() for value in values.values()]
    storages = {one.untyped_storage().data_ptr(): one for one in tensors}
    return sum(one.untyped_storage().nbytes() // one.element_size() for one in storages.values())
