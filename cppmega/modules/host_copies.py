"""Copies on the host, from which another process writes an asynchronous save.

Megatron's worker maps the trainer's tensors on the GPU and copies them itself, which fails for a
model with many parameters. Here the trainer copies, into memory without a name that the worker maps
once: no file system has to be large enough for it, and nothing is left of it when both processes
have ended.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

from cppmega.errors import CppmegaError
from cppmega.host import memory

_THREADS, _PART = 4, 32 * 2**20
"""Threads that copy, and bytes of pinned memory through which each of them does."""
_ALIGNMENT = 64
"""Bytes: no copy shares a cache line with another."""


def on_host(request: Any) -> Any:
    """Copy what a request is to save, and let it save the copies.

    Args:
        request: a Megatron `AsyncRequest`. With a `preload_fn`, its second argument is a list of
            buckets (file, key, (bytes, [(item, tensor), ...])); without, it has nothing to copy.

    Returns:
        A request for Megatron's own process, whatever the trainer does with the tensors meanwhile.

    Raises:
        CppmegaError: `host-memory-too-small`.
    """
    if request.preload_fn is None:
        return request
    first, buckets, *others = request.async_fn_args
    places = list(_places(buckets))
    size = places[-1].end if places else 0
    _refuse_too_large(size)
    order = iter(places)
    described = [
        (file, key, (bytes_, [(item, next(order)) for item, _ in items]))
        for file, key, (bytes_, items) in buckets
    ]
    tensors = [tensor for _, _, (_, items) in buckets for _, tensor in items]
    descriptor = os.memfd_create("cppmega-save")
    try:
        os.ftruncate(descriptor, max(size, 1))
        _copy(descriptor, places, tensors)
        shared = reduction.DupFd(descriptor)  # until the worker has taken it
    finally:
        os.close(descriptor)
    return request._replace(
        async_fn=partial(_write, request.async_fn, shared),
        async_fn_args=[first, described, *others],
        preload_fn=None,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in the shared memory a tensor is, and what it is."""

    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def end(self) -> int:
        size = math.prod(self.shape) * self.dtype.itemsize
        return self.start + -(-size // _ALIGNMENT) * _ALIGNMENT

    def in_(self, mapped: mmap.mmap) -> Tensor:
        """The tensor, whose storage is no larger than itself, because a save writes all of it."""
        count = math.prod(self.shape)
        if count == 0:  # of which no buffer can be made
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(mapped, dtype=self.dtype, count=count, offset=self.start)
        return flat.view(self.shape)


def _places(buckets: list[Any]) -> Iterator[_Place]:
    """One after the other, in the order of the buckets."""
    end = 0
    for _, _, (_, tensors) in buckets:
        for _, tensor in tensors:
            place = _Place(end, tensor.shape, tensor.dtype)
            end = place.end
            yield place


def _copy(descriptor: int, places: list[_Place], tensors: list[Tensor]) -> None:
    """Write the bytes of every tensor to its place.

    By `pwrite`, because a mapping of new memory would be faulted in page by page; and in threads,
    so that the GPU copies for one while another writes.
    """
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()  # the threads use the default stream
    own = threading.local()

    def copy(place: _Place, tensor: Tensor) -> None:
        if not hasattr(own, "staged"):
            own.staged = torch.empty(_PART, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        data, at = tensor.detach().reshape(-1).view(torch.uint8), place.start
        for part in torch.split(data, _PART):
            staged = own.staged[: part.numel()]
            staged.copy_(part)
            left = memoryview(staged.numpy())
            while left:
                written = os.pwrite(descriptor, left, at)
                left, at = left[written:], at + written

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(copy, places, tensors))


def _write(
    write: Callable[..., None],
    shared: Any,
    first: Any,
    described: list[Any],
    *others: Any,
    **named: Any,
) -> None:
    """Map the copies, and write them as Megatron does; in the worker."""
    descriptor = shared.detach()
    try:
        mapped = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    buckets = [
        (file, key, (bytes_, [(item, place.in_(mapped)) for item, place in copies]))
        for file, key, (bytes_, copies) in described
    ]
    write(first, buckets, *others, **named)


def check_alive(caller: Any) -> None:
    """Refuse to wait for a process that has ended.

    Args:
        caller: a Megatron `PersistentAsyncCaller`, whose process has not yet reported the current
            save. If it has ended, nobody waits for it when this rank ends, either.

    Raises:
        CppmegaError: `checkpoint-writer-died`.
    """
    worker = caller.process
    if worker.is_alive():
        return
    caller.process = None
    for name in ("queue", "_persistent_queue"):  # until 0.16, and since
        if (queue := getattr(caller, name, None)) is not None:
            queue.cancel_join_thread()
    raise CppmegaError(
        "checkpoint-writer-died",
        "The process that writes this rank's asynchronous checkpoints ended with exit code "
        f"{worker.exitcode}.",
        "The checkpoint is incomplete, and Megatron would wait for it without end.",
        "see the traceback of the process above; resume from the last complete checkpoint, with "
        "--set async_save=False if it ends again",
    )


def _refuse_too_large(size: int) -> None:
    """Refuse copies that the host has no memory for, which the kernel would answer by a kill."""
    available = memory.available()
    if size <= available:
        return
    raise CppmegaError(
        "host-memory-too-small",
        f"An asynchronous save copies {size / 2**30:.1f} GiB of this rank to the host, which has "
        f"{available / 2**30:.1f} GiB available.",
        "The kernel would kill a process of the run instead.",
        "--set async_save=False saves without copies",
    )
