"""The GPUs of this machine as a training process sees them, and the kernels that import there.

Asked of a child process: torch is slow to import, and a context on every GPU takes memory that the
run needs.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cppmega.errors import CppmegaError
from cppmega.preflight.ask import ask

if TYPE_CHECKING:
    from cppmega.recipe import Recipe

_ASKED = ("index", "uuid", "compute_mode", "ecc.errors.uncorrected.volatile.total")


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU that torch can use."""

    name: str
    capability: tuple[int, int]
    total: int
    """Bytes."""
    free: int
    uuid: str = ""

    @property
    def architecture(self) -> str:
        """sm_90."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True, slots=True)
class Devices:
    """What the machine has, and which kernel packages can be imported on it."""

    found: tuple[Device, ...]
    compiled_for: tuple[str, ...] = ()
    """Architectures in the installed torch: sm_90, compute_90."""
    imports: dict[str, str] = field(default_factory=dict)
    """Module -> why it cannot be imported; empty where it can."""
    driver: dict[str, dict[str, str]] = field(default_factory=dict)
    """By uuid: what nvidia-smi says."""

    @property
    def architectures(self) -> set[str]:
        """Of all devices."""
        return {device.architecture for device in self.found}


def look(
    recipe: Recipe | None, environ: Mapping[str, str], root: Path, *, has_gpu: bool
) -> Devices:
    """Ask a process with the environment of the launch.

    Args:
        recipe: what needs the GPUs; None: a launch of unknown content, which may have none.
        environ: of the launch.
        root: folder that holds megatron/.
        has_gpu: whether this machine has an NVIDIA device at all.

    Raises:
        CppmegaError: `no-gpu`.
    """
    if recipe is not None and not has_gpu:
        raise _no_gpu(recipe, "this machine has no NVIDIA device")
    order = {"root": str(root), "modules": _kernel_modules(recipe)}
    answer = ask("cppmega.preflight.workers.devices", order, environ)
    if not answer["devices"] and recipe is not None:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        shown = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
        raise _no_gpu(recipe, answer["why"] + shown)
    found = tuple(
        Device(d["name"], tuple(d["capability"]), d["total"], d["free"], d["uuid"])
        for d in answer["devices"]
    )
    return Devices(found, tuple(answer["compiled_for"]), answer["imports"], driver(environ))


def _no_gpu(recipe: Recipe, why: str) -> CppmegaError:
    return CppmegaError(
        "no-gpu",
        f"Recipe {recipe.name} takes {recipe.gpus} GPUs, and {why}.",
        "Megatron's training loop and optimizer insist on CUDA.",
        "nvidia-smi; cppmega recipes lists those that run on CPU",
    )


def _kernel_modules(recipe: Recipe | None) -> list[str]:
    """What a run imports late, when its first layer is built or its first kernel is compiled."""
    modules = ["triton", "transformer_engine.pytorch", "cppmega.ops.linear_cross_entropy_triton"]
    if recipe is not None and recipe.uses_dsa and recipe.dsa_kernel_backend == "tilelang":
        variant = "megatron.core.transformer.experimental_attention_variant"
        modules += ["tilelang", f"{variant}.dsa_tilelang_kernels"]
    return modules


def driver(environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """nvidia-smi's view; empty where there is no such program."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs: torch will say more
        return {}
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return {row[1]: dict(zip(_ASKED, row, strict=True)) for row in rows if len(row) == len(_ASKED)}


def gib(number: int) -> str:
    """`139.7 GiB`."""
    return f"{number / 2**30:.1f} GiB"


def smallest(devices: Sequence[Device]) -> Device:
    """The one that a run fills first."""
    return min(devices, key=lambda device: device.total)
