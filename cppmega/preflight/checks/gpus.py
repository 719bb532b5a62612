"""As many GPUs as the launch takes on this host, of an architecture that torch was built for."""

from __future__ import annotations

from collections.abc import Iterator

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.devices import Devices, gib, smallest
from cppmega.preflight.findings import NotApplicable, refuse

AFTER: tuple[str, ...] = ("one_root",)


def check(context: Context) -> str:
    """Count them and look at each.

    Raises:
        CppmegaError: `no-gpu`, `too-few-gpus`, `unlike-gpus`, `architecture-not-built`,
            `architecture-differs`, `gpu-damaged`, `gpu-closed`.
    """
    devices = context.devices
    if context.recipe is None and not devices.found:
        raise NotApplicable("torch finds no GPU, and no recipe asks for one")
    refuse(_found(context, devices))
    one = smallest(devices.found)
    return f"{len(devices.found)} x {one.name} ({one.architecture}, {gib(one.total)})"


def _found(context: Context, devices: Devices) -> Iterator[CppmegaError]:
    here, recipe = devices.found, context.recipe
    if recipe is not None and len(here) < context.gpus_here:
        visible = context.environ.get("CUDA_VISIBLE_DEVICES")
        shown = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        yield CppmegaError(
            "too-few-gpus",
            f"Recipe {recipe.name} takes {context.gpus_here} GPUs on this host, which has "
            f"{len(here)} usable ones{shown}.",
            "torchrun would start ranks without a device.",
            f"--set gpus={len(here)} with a batch that fits, or --nnodes with more hosts",
        )
    kinds = {(device.name, device.architecture) for device in here}
    if len(kinds) > 1:
        yield CppmegaError(
            "unlike-gpus",
            f"The GPUs differ: {', '.join(sorted(name for name, _ in kinds))}.",
            "Every step waits for the slowest, and kernels are chosen by the first.",
            "export CUDA_VISIBLE_DEVICES with the equal ones",
        )
    for architecture in sorted(devices.architectures):
        if devices.compiled_for and not _built(architecture, devices.compiled_for):
            yield CppmegaError(
                "architecture-not-built",
                f"The installed torch is built for {', '.join(devices.compiled_for)}, this GPU is "
                f"{architecture}.",
                "Its kernels do not run there: 'no kernel image is available'.",
                "install a torch wheel for this GPU",
            )
        if recipe is not None and recipe.architectures and architecture not in recipe.architectures:
            yield CppmegaError(
                "architecture-differs",
                f"Recipe {recipe.name} is for {', '.join(recipe.architectures)}, this GPU is "
                f"{architecture}.",
                "Its sizes and kernels were chosen and measured for another one.",
                f"--set \"architectures=('{architecture}',)\" if that is what you want",
            )
    yield from _of_the_driver(devices)


def _built(architecture: str, compiled_for: tuple[str, ...]) -> bool:
    """Exactly, for an older one of the same generation, or from PTX of any older one."""
    major, minor = int(architecture[3:-1]), int(architecture[-1])
    for built in compiled_for:
        kind, _, number = built.partition("_")
        digits = "".join(c for c in number if c.isdigit())
        other = int(digits[:-1]), int(digits[-1])
        same_family = other[0] == major and other[1] <= minor
        if same_family or (kind == "compute" and other <= (major, minor)):
            return True
    return False


def _of_the_driver(devices: Devices) -> Iterator[CppmegaError]:
    for device in devices.found:
        said = devices.driver.get(device.uuid, {})
        lost = said.get("ecc.errors.uncorrected.volatile.total", "")
        if lost.isdigit() and int(lost):
            yield CppmegaError(
                "gpu-damaged",
                f"GPU {said['index']} has had {lost} memory errors that ECC could not correct.",
                "Weights and gradients may have been changed without a word.",
                "have the GPU reset, or leave it out with CUDA_VISIBLE_DEVICES",
            )
        if said.get("compute_mode") == "Prohibited":
            yield CppmegaError(
                "gpu-closed",
                f"GPU {said['index']} is in compute mode Prohibited.",
                "No process may use it.",
                f"nvidia-smi -i {said['index']} -c DEFAULT, or ask whoever set it",
            )
