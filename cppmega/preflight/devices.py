"""The GPUs of this machine as a training process sees them, and the kernels that import there.

A child process is asked: torch is slow to import, and a context on every GPU takes memory that the
run needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cppmega.errors import CppmegaError
from cppmega.host import gpus
from cppmega.host.gpus import Gpu
from cppmega.host.wording import counted
from cppmega.preflight.ask import ask
from cppmega.preflight.messages import Device, DevicesAnswer, DevicesOrder

if TYPE_CHECKING:
    from cppmega.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Devices:
    """The GPUs that the launch can use, and which kernel packages import on them."""

    found: tuple[Device, ...]
    compiled_for: tuple[str, ...] = ()
    """Architectures in the installed torch: sm_90, compute_90."""
    imports: Mapping[str, str] = field(default_factory=dict)
    """Module -> why it cannot be imported; empty where it can."""
    reported: Mapping[str, Gpu] = field(default_factory=dict)
    """The driver's view of the GPUs, by uuid."""

    @property
    def architectures(self) -> set[str]:
        """The architectures of all devices."""
        return {device.architecture for device in self.found}


def look(
    recipe: Recipe | None, environ: Mapping[str, str], root: Path, *, has_gpu: bool
) -> Devices:
    """Ask a process with the environment of the launch.

    Args:
        recipe: what needs the GPUs; None: a launch of unknown content, which may need none.
        environ: of the launch.
        root: folder that holds megatron/.
        has_gpu: whether this machine has an NVIDIA device at all.

    Raises:
        CppmegaError: `no-gpu`.
    """
    if recipe is not None and not has_gpu:
        raise _no_gpu(recipe, "this machine has no NVIDIA device")
    order = DevicesOrder(root=str(root), modules=_kernel_modules(recipe))
    answer = ask("cppmega.preflight.workers.devices", order, DevicesAnswer, environ)
    if not answer.devices and recipe is not None:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        shown = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
        raise _no_gpu(recipe, answer.why + shown)
    reported = {gpu.uuid: gpu for gpu in gpus.reported(environ)}
    return Devices(answer.devices, answer.compiled_for, answer.imports, reported)


def _no_gpu(recipe: Recipe, why: str) -> CppmegaError:
    return CppmegaError(
        "no-gpu",
        f"Recipe {recipe.name} takes {counted(recipe.gpus, 'GPU')}, and {why}.",
        "Megatron's training loop and optimizer require CUDA.",
        "nvidia-smi; cppmega recipes lists the recipes that run on CPU",
    )


def _kernel_modules(recipe: Recipe | None) -> list[str]:
    """The modules that a run imports late: with its first layer or its first kernel."""
    modules = [
        "triton",
        "transformer_engine.pytorch",
        "cppmega.ops.linear_cross_entropy.kernels_triton",
    ]
    if recipe is not None and recipe.uses_tilelang:
        variant = "megatron.core.transformer.experimental_attention_variant"
        modules += ["tilelang", f"{variant}.dsa_tilelang_kernels"]
    return modules


def gib(number: int) -> str:
    """`139.7 GiB`."""
    return f"{number / 2**30:.1f} GiB"


def smallest(devices: Sequence[Device]) -> Device:
    """The device that a run fills first."""
    return min(devices, key=lambda device: device.total)
