"""What the host allows a process is enough for the ranks: files, shared memory, memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.devices import gib
from cppmega.preflight.findings import NotApplicable, refuse

AFTER: tuple[str, ...] = ()

_FILES = 4096
_FILES_OF_A_LOOP = 256
_SHARED = 2**27
"""NCCL and the data loaders' workers; Docker gives half of it where nobody asks for more."""
_PER_RANK = 6 * 2**30
"""torch, Transformer Engine, NCCL's buffers and one shard of a checkpoint on its way out."""


@dataclass(frozen=True, slots=True)
class Host:
    """What is allowed and what is free here."""

    files: int
    """What a process may open: the soft limit, which nothing in a rank raises."""
    shared: int
    memory: int
    most_files: int = 2**31
    """How far `ulimit -n` may raise it: the hard limit."""


def check(context: Context) -> str:
    """Ask the kernel.

    Raises:
        CppmegaError: `too-few-files`, `shared-memory-too-small`, `host-memory-too-small`.
        NotApplicable: the launch runs on CPU, in two small processes.
    """
    if context.recipe is None or not context.needs_gpu:
        refuse(_files(look(), _FILES_OF_A_LOOP))
        raise NotApplicable("no recipe for GPUs is named")
    if not context.training_machine:
        raise NotApplicable("this machine does not train")
    host = look()
    refuse(judge(host, context.gpus_here))
    return f"{host.files} open files, {gib(host.memory)} of memory, {gib(host.shared)} of it shared"


def look() -> Host:
    """This host, and the container around us."""
    files, most = (
        2**31 if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    there = os.statvfs("/dev/shm")
    return Host(
        files,
        there.f_bavail * there.f_frsize,
        min(_available(), _of_the_container()),
        most,
    )


def judge(host: Host, ranks: int) -> Iterator[CppmegaError]:
    """What is not enough for that many ranks."""
    yield from _files(host, _FILES)
    if ranks > 1 and host.shared < _SHARED:
        yield CppmegaError(
            "shared-memory-too-small",
            f"/dev/shm has {gib(host.shared)} free.",
            "NCCL ends with 'unhandled system error' when its buffers do not fit.",
            "docker run --shm-size=16g, or --ipc=host",
        )
    if host.memory < _PER_RANK * ranks:
        yield CppmegaError(
            "host-memory-too-small",
            f"The host has {gib(host.memory)} of memory free for {ranks} ranks; each takes about "
            f"{gib(_PER_RANK)}.",
            "The kernel ends a rank without a word, and the others wait for it.",
            "end what else runs here, or give the container more memory",
        )


def _files(host: Host, needed: int) -> Iterator[CppmegaError]:
    if host.files >= needed:
        return
    wanted = f"ulimit -n {min(_FILES * 16, host.most_files)}"
    if host.most_files < needed:
        wanted = (
            f"raise the hard limit first: docker run --ulimit nofile={_FILES * 16}, or nofile in "
            "/etc/security/limits.conf"
        )
    yield CppmegaError(
        "too-few-files",
        f"A process may open {host.files} files (`ulimit -n`; the hard limit is "
        f"{host.most_files}), and the ranks need {needed}.",
        "Data loaders, process groups and checkpoints of many shards open thousands; the run would "
        "end with 'Too many open files'.",
        wanted,
    )


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**62


def _of_the_container() -> int:
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 2**62
    if limit == "max":
        return 2**62
    return int(limit) - used + int(cache.get("inactive_file", 0))
