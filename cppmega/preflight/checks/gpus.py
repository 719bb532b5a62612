"""This host has the GPUs that the launch needs, of an architecture that torch was built for."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.host.wording import counted
from cppmega.preflight.context import Context
from cppmega.preflight.devices import gib, smallest
from cppmega.preflight.findings import NotApplicable, Problems

AFTER: tuple[str, ...] = ("one_root",)


def check(context: Context) -> Problems:
    """Count them, and compare each with the recipe, with torch and with the driver's report.

    Yields:
        `too-few-gpus`, `unlike-gpus`, `architecture-not-built`, `architecture-differs`,
        `gpu-damaged`, `gpu-closed`.

    Raises:
        CppmegaError: `no-gpu`.
        NotApplicable: there is no GPU, and no recipe needs one.
    """
    devices, recipe = context.devices, context.recipe
    here = devices.found
    if recipe is None and not here:
        raise NotApplicable("torch finds no GPU, and no recipe needs one")
    if recipe is not None and len(here) < context.gpus_here:
        visible = context.environ.get("CUDA_VISIBLE_DEVICES")
        shown = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        yield CppmegaError(
            "too-few-gpus",
            f"Recipe {recipe.name} takes {counted(context.gpus_here, 'GPU')} on this host, which "
            f"has {counted(len(here), 'usable one')}{shown}.",
            "torchrun would start ranks without a device.",
            f"--set gpus={len(here)} with a batch that fits, or --nnodes with more hosts",
        )
    kinds = {(device.name, device.architecture) for device in here}
    if len(kinds) > 1:
        yield CppmegaError(
            "unlike-gpus",
            f"The GPUs differ: {', '.join(sorted(name for name, _ in kinds))}.",
            "Every step waits for the slowest, and kernels are chosen for the first.",
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
                f"--set \"architectures=('{architecture}',)\" if you mean to train there",
            )
    reported = [devices.reported.get(device.uuid) for device in here]
    for gpu in filter(None, reported):
        if gpu.uncorrected_errors:
            yield CppmegaError(
                "gpu-damaged",
                f"GPU {gpu.index} has had {gpu.uncorrected_errors} memory errors that ECC could "
                "not correct.",
                "Weights and gradients may have been silently changed.",
                "have the GPU reset, or exclude it with CUDA_VISIBLE_DEVICES",
            )
        if gpu.compute_mode == "Prohibited":
            yield CppmegaError(
                "gpu-closed",
                f"GPU {gpu.index} is in compute mode Prohibited.",
                "No process may use it.",
                f"nvidia-smi -i {gpu.index} -c DEFAULT, or ask whoever set it",
            )
    one = smallest(here)
    return f"{len(here)} x {one.name} ({one.architecture}, {gib(one.total)})"


def _built(architecture: str, compiled_for: tuple[str, ...]) -> bool:
    """Whether torch has code for it: its own, its generation's, or PTX of an older one."""
    major, minor = int(architecture[3:-1]), int(architecture[-1])
    for built in compiled_for:
        kind, _, number = built.partition("_")
        digits = "".join(c for c in number if c.isdigit())
        other = int(digits[:-1]), int(digits[-1])
        same_family = other[0] == major and other[1] <= minor
        if same_family or (kind == "compute" and other <= (major, minor)):
            return True
    return False
