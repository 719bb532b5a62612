"""No other process holds memory of the GPUs."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.devices import gib
from cppmega.preflight.findings import NotApplicable, refuse

AFTER: tuple[str, ...] = ("gpus",)

_OWN = 2 * 2**30
"""Bytes that the driver and the inspecting process use."""


def check(context: Context) -> str:
    """Compare the free memory of each GPU with its total.

    Raises:
        CppmegaError: `gpu-occupied`.
    """
    devices = context.devices.found
    if not devices:
        raise NotApplicable("there is no GPU")
    refuse(
        CppmegaError(
            "gpu-occupied",
            f"GPU {index} ({device.name}): {gib(device.total - device.free)} of "
            f"{gib(device.total)} are in use by another process.",
            "The run would end out of memory later, or both would run at half speed.",
            "nvidia-smi shows whose it is; ranks of a killed run may still be alive",
        )
        for index, device in enumerate(devices)
        if device.total - device.free > _OWN
    )
    return f"{gib(min(device.free for device in devices))} are free on the fullest GPU"
