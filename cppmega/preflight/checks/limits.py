"""The host allows its ranks enough open files, shared memory and memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass

from cppmega.errors import CppmegaError
from cppmega.host import memory
from cppmega.host.wording import counted
from cppmega.preflight.context import Context
from cppmega.preflight.devices import gib
from cppmega.preflight.findings import NotApplicable, Problems
from cppmega.recipe import Recipe, arithmetic

_FILES = 4096
_FILES_OF_A_LOOP = 256
_SHARED = 2**27
"""Bytes for NCCL and the data loaders' workers; Docker's default is half of that."""
_PER_PARAMETER = 16
"""Bytes: weight, gradient and two moments in fp32."""
_PER_RANK = 6 * 2**30
"""Bytes: torch, Transformer Engine, NCCL's buffers, one shard of a checkpoint being written."""


@dataclass(frozen=True, slots=True)
class Host:
    """The limits of a process on this host, and the memory that is free."""

    files: int
    """Soft limit of open files; no code in a rank raises it."""
    shared: int
    memory: int
    most_files: int = 2**31
    """Hard limit, up to which `ulimit -n` may raise it."""


def check(context: Context) -> Problems:
    """Compare this host with what the ranks need; yields `host-limit`.

    Raises:
        NotApplicable: the launch runs on CPU, in two small processes.
    """
    host = measure()
    if context.recipe is None or not context.needs_gpu:
        yield from _too_few_files(host, _FILES_OF_A_LOOP)
        if context.recipe is not None and context.training_machine:
            yield from _too_large(host, context.recipe)
        raise NotApplicable("no recipe for GPUs is named")
    if not context.training_machine:
        raise NotApplicable("this machine does not train")
    yield from shortages(host, context.gpus_here)
    return f"{host.files} open files, {gib(host.memory)} of memory, {gib(host.shared)} of it shared"


def measure() -> Host:
    """This host, within the limits of its container."""
    files, most = (
        2**31 if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    shared = os.statvfs("/dev/shm")
    return Host(files, shared.f_bavail * shared.f_frsize, memory.available(), most)


def shortages(host: Host, ranks: int) -> Iterator[CppmegaError]:
    """Everything of which the host has too little for this number of ranks."""
    yield from _too_few_files(host, _FILES)
    if ranks > 1 and host.shared < _SHARED:
        yield CppmegaError(
            "host-limit",
            f"/dev/shm has {gib(host.shared)} free.",
            "NCCL ends with 'unhandled system error' when its buffers do not fit.",
            "docker run --shm-size=16g, or --ipc=host",
        )
    if host.memory < _PER_RANK * ranks:
        yield CppmegaError(
            "host-limit",
            f"The host has {gib(host.memory)} of memory free for {counted(ranks, 'rank')}; each "
            f"takes about {gib(_PER_RANK)}.",
            "The OOM killer would kill a rank, and the others would hang in a collective.",
            "end other processes on this host, or give the container more memory",
        )


def _too_large(host: Host, recipe: Recipe) -> Iterator[CppmegaError]:
    """A model of a CPU recipe that cannot be trained in this host's memory."""
    needed = _PER_PARAMETER * arithmetic.parameters(recipe).total
    if needed > host.memory:
        yield CppmegaError(
            "host-limit",
            f"The model of {recipe.name} takes {gib(needed)} in each process, and the host has "
            f"{gib(host.memory)} of memory free.",
            "The OOM killer would end the run while it builds the model.",
            "--set hidden_size=... or num_layers=..., with smaller values",
        )


def _too_few_files(host: Host, needed: int) -> Iterator[CppmegaError]:
    if host.files >= needed:
        return
    wanted = f"ulimit -n {min(_FILES * 16, host.most_files)}"
    if host.most_files < needed:
        wanted = (
            f"raise the hard limit first: docker run --ulimit nofile={_FILES * 16}, or nofile in "
            "/etc/security/limits.conf"
        )
    yield CppmegaError(
        "host-limit",
        f"A process may open {host.files} files (`ulimit -n`; the hard limit is "
        f"{host.most_files}), and the ranks need {needed}.",
        "Data loaders, process groups and checkpoints of many shards open thousands; the run would "
        "end with 'Too many open files'.",
        wanted,
    )
