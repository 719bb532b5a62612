"""What the DSA layers of one forward share, which its recomputation finds again.

A stack of layers opens a forward; its layers reach it with `current`. A checkpoint runs its function
a second time in the backward, when another microbatch's forward may have come in between, and in a
thread of autograd's: a function that is `bound` to its forward finds that one again. The forward
is released together with the last function that is bound to it: after its backward, or, where
nothing is recomputed, as soon as its stack is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from cppmega.errors import CppmegaError

P = ParamSpec("P")
R = TypeVar("R")


class Forward:
    """One pass of one microbatch through a stack; layers keep on it what later layers use."""


_current: ContextVar[Forward | None] = ContextVar("_current", default=None)


@contextmanager
def forward() -> Iterator[Forward]:
    """Open the forward of a stack; a stack within another one has its own."""
    token = _current.set(Forward())
    try:
        yield current()
    finally:
        _current.reset(token)


def current() -> Forward:
    """The forward that this code runs in.

    Raises:
        CppmegaError: `dsa-layer-outside-a-stack`: a layer is called without its stack.
    """
    found = _current.get()
    if found is None:
        raise CppmegaError(
            "dsa-layer-outside-a-stack",
            "A DSA layer that shares chosen keys was called outside a forward of its stack.",
            "It could only use what another microbatch left behind.",
            "call the model, or train without sharing (--dsa-indexer-topk-freq 1)",
        )
    return found


def bound(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that runs now and again in the backward find this forward both times."""
    here = _current.get()
    if here is None:
        return function

    @functools.wraps(function)
    def in_forward(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _current.set(here)
        try:
            return function(*args, **kwargs)
        finally:
            _current.reset(token)

    return in_forward
