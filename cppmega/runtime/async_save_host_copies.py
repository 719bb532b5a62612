"""Copies on the host, from which another process writes an asynchronous save.

Megatron's worker maps the trainer's tensors on the GPU and copies them itself, which fails for a
model with many parameters. Here the trainer copies them into anonymous memory that the worker maps
once: no file system needs room for it, and nothing is left when both processes have ended.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
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

_FILES, _PART = 8, 16 * 2**20
"""Files in memory, and bytes of pinned memory through which the thread of each file copies.

A write locks its file: threads that wrote to one file would wait for each other.
"""
_ALIGNMENT = 64
"""Bytes: no copy shares a cache line with another."""


def on_host(request: Any) -> Any:
    """Copy the tensors of a save request to the host, and return a request that saves the copies.

    Args:
        request: a Megatron `AsyncRequest`. With a `preload_fn`, its second argument is a list of
            buckets (file, key, (bytes, [(item, tensor), ...])); without, it has nothing to copy.

    Returns:
        A request for Megatron's own process, whatever the trainer does with the tensors meanwhile.

    Raises:
        CppmegaError: `host-limit`.
    """
    if request.preload_fn is None:
        return request
    first, buckets, *others = request.async_fn_args
    places = list(_places(buckets))
    sizes = _sizes(places)
    _refuse_too_large(sum(sizes))
    order = iter(places)
    described = [
        (file, key, (bytes_, [(item, next(order)) for item, _ in items]))
        for file, key, (bytes_, items) in buckets
    ]
    tensors = [tensor for _, _, (_, items) in buckets for _, tensor in items]
    with contextlib.ExitStack() as opened:
        descriptors = []
        for size in sizes:
            descriptors.append(os.memfd_create("cppmega-save"))
            opened.callback(os.close, descriptors[-1])
            os.ftruncate(descriptors[-1], max(size, 1))  # an empty file cannot be mapped
        _copy(descriptors, places, tensors)
        shared = [reduction.DupFd(one) for one in descriptors]  # open until the worker receives it
    return request._replace(
        async_fn=partial(_write, request.async_fn, shared),
        async_fn_args=[first, described, *others],
        preload_fn=None,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a tensor in the shared memory, its shape and its type."""

    file: int
    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def end(self) -> int:
        size = math.prod(self.shape) * self.dtype.itemsize
        return self.start + -(-size // _ALIGNMENT) * _ALIGNMENT

    def in_(self, files: list[mmap.mmap]) -> Tensor:
        """Return the tensor with a storage of exactly its size, because a save writes all of it."""
        count = math.prod(self.shape)
        if count == 0:  # `frombuffer` rejects empty buffers
            return torch.empty(self.shape, dtype=self.dtype)
        mapped = files[self.file]
        flat = torch.frombuffer(mapped, dtype=self.dtype, count=count, offset=self.start)
        return flat.view(self.shape)


def _places(buckets: list[Any]) -> Iterator[_Place]:
    """Assign a place to every tensor in bucket order, at the end of the smallest file so far."""
    ends = [0] * _FILES
    for _, _, (_, tensors) in buckets:
        for _, tensor in tensors:
            file = ends.index(min(ends))
            place = _Place(file, ends[file], tensor.shape, tensor.dtype)
            ends[file] = place.end
            yield place


def _sizes(places: list[_Place]) -> list[int]:
    """Bytes of each file."""
    sizes = [0] * _FILES
    for place in places:
        sizes[place.file] = max(sizes[place.file], place.end)
    return sizes


def _copy(descriptors: list[int], places: list[_Place], tensors: list[Tensor]) -> None:
    """Write the bytes of every tensor to its place.

    This uses `pwrite`, because a mapping of new memory would be faulted in page by page.
    """
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()  # the threads use the default stream
    of_file: list[list[tuple[int, Tensor]]] = [[] for _ in descriptors]
    for place, tensor in zip(places, tensors, strict=True):
        of_file[place.file].append((place.start, tensor))
    with ThreadPoolExecutor(len(descriptors)) as pool:
        list(pool.map(_fill, descriptors, of_file))


def _fill(descriptor: int, tensors: list[tuple[int, Tensor]]) -> None:
    """Write the bytes of each tensor to where it starts in one file."""
    pinned = any(tensor.is_cuda for _, tensor in tensors)
    stage = torch.empty(_PART, dtype=torch.uint8, pin_memory=pinned)
    for at, tensor in tensors:
        for part in torch.split(_bytes(tensor), _PART):
            staged = stage[: part.numel()]
            staged.copy_(part)
            left = memoryview(staged.numpy())
            while left:
                written = os.pwrite(descriptor, left, at)
                left, at = left[written:], at + written


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of all elements in order, without a copy if memory has them in order."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # `reshape` keeps the stride of an expanded or a single element
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _write(
    write: Callable[..., None],
    shared: list[Any],
    first: Any,
    described: list[Any],
    *others: Any,
    **named: Any,
) -> None:
    """Map the copies in the worker, and write them as Megatron does."""
    files = [_mapped(one.detach()) for one in shared]
    buckets = [
        (file, key, (bytes_, [(item, place.in_(files)) for item, place in copies]))
        for file, key, (bytes_, copies) in described
    ]
    write(first, buckets, *others, **named)


def _mapped(descriptor: int) -> mmap.mmap:
    """Map a file; its memory lives as long as any tensor in it."""
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def check_alive(caller: Any) -> None:
    """Refuse to wait for a process that has ended.

    Args:
        caller: a Megatron `PersistentAsyncCaller`, whose process has not yet reported the current
            save. If it has ended, this rank does not wait for it on exit, either.

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
        "The checkpoint is incomplete, and Megatron would wait for it forever.",
        "see the traceback of the process above; resume from the last complete checkpoint, with "
        "--set async_save=False if it ends again",
    )


def _refuse_too_large(size: int) -> None:
    """Refuse copies that the host lacks memory for; the OOM killer would end a process instead."""
    available = memory.available()
    if size <= available:
        return
    raise CppmegaError(
        "host-limit",
        f"An asynchronous save copies {size / 2**30:.1f} GiB of this rank to the host, which has "
        f"{available / 2**30:.1f} GiB available.",
        "The kernel would kill a process of the run instead.",
        "--set async_save=False saves without copies",
    )
