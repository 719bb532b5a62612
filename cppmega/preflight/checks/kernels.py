"""The kernels that a run only imports late can be imported on this GPU."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, refuse

AFTER: tuple[str, ...] = ("gpus",)


def check(context: Context) -> str:
    """Import them in a process that sees the GPUs.

    Raises:
        CppmegaError: `kernel-not-importable`.
    """
    devices = context.devices
    if not devices.found:
        raise NotApplicable("there is no GPU")
    refuse(
        CppmegaError(
            "kernel-not-importable",
            f"{module} cannot be imported on {', '.join(sorted(devices.architectures))}: {why}",
            "The run would end when its first layer is built.",
            f"python -c 'import {module}'; reinstall it for this torch and CUDA",
        )
        for module, why in devices.imports.items()
        if why
    )
    return ", ".join(devices.imports)
