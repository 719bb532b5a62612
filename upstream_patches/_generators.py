"""Generators that share their state like CUDA's, for proofs on CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

TRACKED = "model-parallel-rng"


class Generator(torch.Generator):
    """A generator of masks that shares its state, a seed and an offset, like CUDA's."""

    def __new__(cls, *_: Any) -> Generator:
        return super().__new__(cls)

    def __init__(self, *state: int) -> None:
        self.state = list(state)

    def manual_seed(self, seed: int) -> Generator:
        self.state[:] = [seed, 0]
        return self

    def graphsafe_get_state(self) -> Generator:
        other = Generator()
        other.state = self.state
        return other

    def graphsafe_set_state(self, other: Any) -> None:
        self.state = other.state

    def get_state(self) -> torch.Tensor:
        return torch.tensor(self.state)

    def set_state(self, state: torch.Tensor) -> None:
        self.state[:] = state.tolist()

    def clone_state(self) -> Generator:
        return Generator(*self.state)

    def mask(self) -> torch.Tensor:
        """Draw: the offset advances in place."""
        self.state[1] += 1
        seed, offset = self.state
        return torch.tensor([1.0, 100.0 * seed, offset])


@contextlib.contextmanager
def on_cpu(module: Any, device: Generator, capturing: bool = False) -> Iterator[None]:
    """Make a module use the states of a stand-in for the device's generator.

    Args:
        module: the module, which may have imported `_lazy_call` and `_lazy_init`.
        device: the generator.
        capturing: whether a CUDA graph is captured.
    """

    def state(_: Any = None, **__: Any) -> torch.Tensor:
        return device.get_state()

    cuda = {
        "current_device": lambda: 0,
        "default_generators": (device,),
        "get_rng_state": state,
        "is_current_stream_capturing": lambda: capturing,
    }
    calls = {"_lazy_init": lambda: None, "_lazy_call": lambda call: call()}
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(torch.cuda.random, "get_rng_state", state),
        mock.patch.multiple(module, create=True, **calls),
    ):
        yield


def outcome(recompute: Callable[..., Any], device: Generator, tracker: Any) -> list[Any]:
    """Return the output of two layers, its gradient, and the next masks applied to ones.

    Args:
        recompute: called with a layer and its input, returns the output.
        device: the device's generator.
        tracker: the tracker of the other generators.
    """

    def layer(hidden: Any) -> Any:
        """Apply dropout with the device's generator, then with the model-parallel ranks' one."""
        dropped = hidden * device.mask()
        with tracker.fork():
            return dropped * device.mask()

    device.manual_seed(1)
    tracker.reset()
    tracker.add(TRACKED, 2)
    known = [device.state, tracker.get_states()[TRACKED].state]
    given = torch.ones(3, requires_grad=True)
    hidden = given
    for _ in range(2):
        hidden = recompute(layer, hidden)
    hidden.sum().backward()
    now = [device.state, tracker.get_states()[TRACKED].state]
    assert all(a is b for a, b in zip(now, known, strict=True)), "a known generator was replaced"
    return [hidden.detach(), given.grad, layer(torch.ones(3))]
