"""The kernels that a run only imports late can be imported on this GPU."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, Problems

AFTER: tuple[str, ...] = ("gpus",)


def check(context: Context) -> Problems:
    """Import them in a process that sees the GPUs; yields `kernel-not-importable`."""
    devices = context.devices
    if not devices.found:
        raise NotApplicable("there is no GPU")
    for module, why in devices.imports.items():
        if why:
            yield CppmegaError(
                "kernel-not-importable",
                f"{module} cannot be imported on {', '.join(sorted(devices.architectures))}: {why}",
                "The run would end when its first layer is built.",
                f"python -c 'import {module}'; reinstall it for this torch and CUDA",
            )
    return ", ".join(devices.imports)
