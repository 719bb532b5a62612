"""Facts about this machine that are reported, not checked."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cppmega.host import gpus
from cppmega.host import packages as stack
from cppmega.preflight.checks import folders, limits
from cppmega.preflight.context import gpu_here
from cppmega.preflight.devices import gib


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """This machine, as `cppmega doctor --json` prints it."""

    host: str
    system: str
    cpus: int
    """Cores that this process may use."""
    memory: int
    """Bytes that are free, within the limits of the container."""
    shared_memory: int
    open_files: int
    disks: dict[str, int]
    """Folder -> bytes that are free there."""
    python: str
    interpreter: str
    packages: dict[str, str]
    gpus: tuple[str, ...]
    no_gpu: str = ""
    """Why there is no GPU; empty if there is one."""


def inspect(runs: Path) -> Machine:
    """Measure this machine; torch is not imported.

    Args:
        runs: the folder of the run folders, whether it exists or not.
    """
    host, reported = limits.measure(), gpus.reported()
    versions = {name: stack.version(name) for name in ("cuda", *stack.NAMES)}
    return Machine(
        host=socket.gethostname(),
        system=platform.platform(),
        cpus=len(os.sched_getaffinity(0)),
        memory=host.memory,
        shared_memory=host.shared,
        open_files=host.files,
        disks={str(place): _free(place) for place in (runs.absolute(), _temporary())},
        python=platform.python_version(),
        interpreter=sys.executable,
        packages={name: found for name, found in versions.items() if found is not None},
        gpus=tuple(f"{gpu.name}, {gpu.memory}" for gpu in reported),
        no_gpu="" if reported else _no_gpu(),
    )


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


def _free(folder: Path) -> int:
    return shutil.disk_usage(folders.nearest(folder)).free


def _no_gpu() -> str:
    if gpu_here():
        return "there is an NVIDIA device, but nvidia-smi is missing or does not answer"
    return "this machine has no NVIDIA device"


def described(machine: Machine) -> Iterator[tuple[str, str]]:
    """The facts, one for each line."""
    yield (
        "machine",
        f"{machine.host}, {machine.system}, {machine.cpus} CPU cores, {gib(machine.memory)} of "
        f"memory and {gib(machine.shared_memory)} of /dev/shm free, at most {machine.open_files} "
        "open files",
    )
    yield "disk", ", ".join(f"{gib(free)} free in {name}" for name, free in machine.disks.items())
    yield "python", f"{machine.python} in {machine.interpreter}"
    versions = (f"{name} {version}" for name, version in machine.packages.items())
    yield "packages", ", ".join(versions) or "none of the training packages is installed"
    yield (
        "gpu",
        "; ".join(machine.gpus)
        or (
            f"none: {machine.no_gpu}. Reading and patching a tree, most proofs and the recipe "
            "smoke_cpu need none"
        ),
    )
