"""Launches on the GPU of a kernel's tensors, whichever GPU is current.

Triton launches on the current device and its stream. With tensors of another device the kernel
would fault, or run unordered with the work of that device's stream.

A launch also states whether products and sums are fused, so that the bits of a result depend on no
default: that of Triton changes in 3.10, and a variable changes it in every release.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

_Kernel = TypeVar("_Kernel")
_compiles = ContextVar("_compiles", default=False)


@contextmanager
def only_compiled() -> Iterator[None]:
    """Compile the kernels that are launched within side by side, and run none of them.

    The compiler's passes and ptxas leave Python's lock to other threads. Before Triton 3.5, the
    kernels are compiled one after the other.
    """
    import triton

    mode = getattr(triton, "AsyncCompileMode", None)
    token = _compiles.set(True)
    try:
        if mode is not None:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads, mode(threads):
                yield
        else:
            yield
    finally:
        _compiles.reset(token)


def on_its_device(kernel: _Kernel) -> _Kernel:
    """Launch a Triton kernel on the device of its first argument; a decorator above `triton.jit`.

    The kernel remains a kernel of Triton's, so that torch.compile traces its launches, for which
    Inductor generates guards of its own.
    """
    kind: Any = type(kernel)
    kernel.__class__ = _launching(kind)
    return kernel


@functools.cache
def _launching(kind: Any) -> Any:
    """The class of Triton's kernels, compiled or interpreted, that launches on its device."""

    class OnItsDevice(kind):  # type: ignore[misc]
        def __getitem__(self, grid: Any) -> Any:
            run = self.run

            def launch(*arguments: Any, **named: Any) -> Any:
                named.setdefault("enable_fp_fusion", True)
                compiles = _compiles.get()
                first = arguments[0] if arguments else next(iter(named.values()))
                try:
                    device = first.get_device()
                except AttributeError:  # a descriptor of a tensor's tiles
                    device = first.base.get_device()
                if device < 0 or device == torch._C._cuda_getDevice():
                    return run(*arguments, grid=grid, warmup=compiles, **named)
                with torch.cuda.device(device):
                    return run(*arguments, grid=grid, warmup=compiles, **named)

            return launch

    return OnItsDevice


def on_device_of(tensor: torch.Tensor) -> torch.cuda.device:
    """A context in which a tensor's device is current, for launches of other packages."""
    return torch.cuda.device_of(tensor)
