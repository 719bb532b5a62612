"""State that the DSA layers of one forward pass share, kept for the recomputation of that pass.

A stack of layers opens a forward; its layers reach it with `current`. Activation checkpointing runs
a function again in the backward, in an autograd thread, when the forward of another microbatch may
have run in between; a function that is `bound` to its forward still finds the right one. The
forward is released together with the last function that is bound to it: after its backward, or,
where nothing is recomputed, as soon as its stack has finished.

Megatron captures layers in CUDA graphs one by one, before the steps that replay them, without
calling the stack. It captures all layers of one microbatch's forward before those of the next, so
the latest value that another layer kept is the one that a layer needs.
"""

from __future__ import annotations

import sys
from collections import ChainMap, UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch

from cppmega.errors import CppmegaError
from cppmega.host import env

P = ParamSpec("P")
R = TypeVar("R")


class Forward:
    """One pass of one microbatch through a stack; layers keep on it what later layers use."""

    def __init__(self, earlier: Forward | None = None) -> None:
        self.earlier = earlier
        """The forward of the previous MTP depth; its layers may share with those of this one."""

    def holder(self, name: str) -> ChainMap[Any, Any]:
        """Create an empty mapping to keep under a name; lookups also find what earlier depths
        keep there."""
        kept: ChainMap[Any, Any] | None = getattr(self.earlier, name, None)
        return ChainMap({}) if kept is None else kept.new_child()


class _CapturedForward(Forward):
    """One call of a layer that is warmed up or captured without its stack."""

    def holder(self, name: str) -> ChainMap[Any, Any]:
        """A mapping that finds the latest values of other calls, as of the call of this layer."""
        latest = _latest.setdefault((name, _records()), {})
        return ChainMap(_Recorder(latest), _ReadByGraphs(latest))  # type: ignore[arg-type]


class _Recorder(UserDict[Any, Any]):
    """The values that a call keeps; each also becomes the latest value for later calls."""

    def __init__(self, latest: dict[Any, Any]) -> None:
        super().__init__()
        self.latest = latest

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.latest[key] = value


class _ReadByGraphs(UserDict[Any, Any]):
    """The values that other calls kept; one that is read during a capture is never released,
    because the replayed graph reads the same memory."""

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if _records():
            _read_by_graphs.append(value)
        return value


_latest: dict[tuple[str, bool], dict[Any, Any]] = {}
"""The values that captured layers keep, by name and by whether a graph recorded them.

A layer that is being warmed up must not use recorded values, which no graph has computed yet.
"""
_read_by_graphs: list[Any] = []
"""Never released, because the deletion of a graph cannot be observed."""


def _records() -> bool:
    """Whether the current stream is being captured in a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _captured_call() -> Forward | None:
    """A forward for a layer that Megatron captures by itself; None outside a capture."""
    graphs = sys.modules.get("megatron.core.transformer.cuda_graphs")
    return _CapturedForward() if graphs is not None and graphs.is_graph_capturing() else None


_current: ContextVar[Forward | None] = ContextVar("_current", default=None)


@contextmanager
def _inside(here: Forward) -> Iterator[None]:
    token = _current.set(here)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def forward() -> Iterator[Forward]:
    """Open the forward of a stack; the stack of an MTP depth runs in the forward of its depth."""
    here = _current.get()
    if here is not None:
        yield here
        return
    _latest.clear()  # the capture is over
    here = Forward()
    with _inside(here):
        yield here


class Depths:
    """The MTP depths of one forward, in sequence; the same layers may run in each."""

    def __init__(self) -> None:
        self._last: Forward | None = None

    def next(self, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function so that it runs as the next depth, in its own forward."""

        def in_depth(*args: P.args, **kwargs: P.kwargs) -> R:
            self._last = Forward(self._last)
            with _inside(self._last):
                return function(*args, **kwargs)

        return in_depth


def current() -> Forward:
    """The forward in which this code runs; a call of a layer captured by itself has its own.

    Raises:
        CppmegaError: `dsa-layer-outside-a-stack`: a layer was called without its stack.
    """
    found = _current.get() or _captured_call()
    if found is None:
        raise CppmegaError(
            "dsa-layer-outside-a-stack",
            "A DSA layer that shares chosen keys was called outside a forward of its stack.",
            "It could only use the keys of another microbatch.",
            "call the model, or train without sharing (--dsa-indexer-topk-freq 1, or unset "
            f"{env.INDEX_CACHE.name})",
        )
    return found


def bound(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function that runs now and again in the backward, so that both runs find this
    forward."""
    here = _current.get() or _captured_call()
    if here is None:
        return function

    def in_forward(*args: P.args, **kwargs: P.kwargs) -> R:
        with _inside(here):
            return function(*args, **kwargs)

    return in_forward
