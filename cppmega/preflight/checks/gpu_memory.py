"""No other process holds memory of the GPUs, and the model fits, by estimate."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.devices import gib, smallest
from cppmega.preflight.findings import NotApplicable, Problems

AFTER: tuple[str, ...] = ("gpus",)

_OWN = 2 * 2**30
"""Bytes that the driver and the inspecting process use."""
_NEAR = 0.92
"""Share of a GPU above which fragmentation decides whether a run fits."""


def check(context: Context) -> Problems:
    """Compare the free memory of each GPU with its total, and the estimate with the smallest GPU.

    Yields:
        `gpu-occupied`, `does-not-fit`.

    Raises:
        NotApplicable: there is no GPU.
    """
    devices = context.devices.found
    if not devices:
        raise NotApplicable("there is no GPU")
    for index, device in enumerate(devices):
        if device.total - device.free > _OWN:
            yield CppmegaError(
                "gpu-occupied",
                f"GPU {index} ({device.name}): {gib(device.total - device.free)} of "
                f"{gib(device.total)} are in use by another process.",
                "The run would end out of memory later, or both would run at half speed.",
                "nvidia-smi shows whose it is; ranks of a killed run may still be alive",
            )
    free = f"{gib(min(device.free for device in devices))} are free on the fullest GPU"
    if context.recipe is None:
        return free
    one, needs = smallest(devices), context.memory
    parts = (
        f"{gib(needs.states)} of weights, gradients and optimizer, {gib(needs.activations)} of "
        f"activations, {gib(needs.logits)} of logits"
    )
    if needs.total > one.total:
        yield CppmegaError(
            "does-not-fit",
            f"Recipe {context.recipe.name} takes about {gib(needs.total)} ({parts}); "
            f"{one.name} has {gib(one.total)}.",
            "The run would end out of memory in its first step.",
            "--set micro_batch_size=..., recompute_modules, or more GPUs",
        )
    near = " (near the limit: only a trial can tell)" if needs.total > _NEAR * one.total else ""
    return f"{free}; about {gib(needs.total)} of {gib(one.total)}{near}: {parts}"
