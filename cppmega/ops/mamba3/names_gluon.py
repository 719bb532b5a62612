"""Gluon's functions that Triton 3.6 names otherwise than later releases, under one name."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma


def _named(owner: Any, name: str, before: str) -> Any:
    """What the installed Triton calls by the first name, or before, by the second."""
    return getattr(owner, name if hasattr(owner, name) else before)


barrier = _named(gl, "barrier", "thread_barrier")
"""`()`: what any thread of the program has done before is seen by all of them after."""
copy_in = _named(async_copy, "async_load", "async_copy_global_to_shared")
"""`(shared, pointers)`: begin to copy to shared memory, each thread its own elements."""
copy_tile_in = _named(tma, "async_load", "async_copy_global_to_shared")
"""`(descriptor, coordinates, barrier, shared)`: begin to copy a tile to shared memory."""
viewed = _named(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
"""`(shared, dtype, shape, layout)`: the same shared memory seen as of another form."""
