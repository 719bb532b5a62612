"""The GPUs of this host as the driver's tool reports them, without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

_QUERY = (
    *("index", "uuid", "name", "memory.total", "compute_mode"),
    "ecc.errors.uncorrected.volatile.total",
)
_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Gpu:
    """One row of nvidia-smi."""

    index: str
    uuid: str
    name: str
    memory: str
    """Memory with its unit: `143771 MiB`."""
    compute_mode: str = "Default"
    uncorrected_errors: int = 0
    """Memory errors since the driver was loaded that ECC could not correct."""


def reported(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Every GPU that nvidia-smi lists; empty where it is missing or does not answer."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs: torch will say more
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    complete = (row for row in rows if len(row) == len(_QUERY))
    return [
        Gpu(index, uuid, name, memory, mode, int(errors) if errors.isdigit() else 0)
        for index, uuid, name, memory, mode, errors in complete
    ]
