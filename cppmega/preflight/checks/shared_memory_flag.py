"""On sm_120 and sm_121 every TileLang kernel that is imported merges its shared memory.

A block has 99 KiB there. Our kernels, Megatron's and mamba_ssm's are checked; the flag must have
the value True when the kernel is built; its presence is not enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cppmega.errors import CppmegaError
from cppmega.host.packages import folder_of
from cppmega.host.paths import PACKAGE
from cppmega.page import Page
from cppmega.preflight.ask import ask
from cppmega.preflight.checks.kernel_parity import SMALL
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, refuse
from cppmega.preflight.messages import TilelangAnswer, TilelangOrder

AFTER: tuple[str, ...] = ("one_root", "gpus")


def check(context: Context) -> str:
    """Ask a process that records the pass configs of each kernel.

    Raises:
        CppmegaError: `shared-memory-flag`.
        NotApplicable: the GPUs have more shared memory.
    """
    architectures = context.devices.architectures
    if not architectures & SMALL:
        names = ", ".join(sorted(architectures)) or "no GPU"
        raise NotApplicable(f"{names} has enough shared memory")
    root = context.session.read_tree().root
    order = TilelangOrder(root=str(root), packages=[str(folder) for folder in _packages(root)])
    worker = "cppmega.preflight.workers.tilelang_kernels"
    kernels = ask(worker, order, TilelangAnswer, context.environ).kernels
    command = _command(context.session.pages.values())
    refuse(
        CppmegaError(
            "shared-memory-flag",
            f"{kernel.path}:{kernel.line}: {kernel.name} is not built with "
            f"TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: True ({kernel.reason}).",
            "It may need more than the 99 KiB that a block has here, and then cannot be launched.",
            command,
        )
        for kernel in kernels
        if kernel.reason
    )
    return f"{len(kernels)} TileLang kernels carry the flag"


def _command(pages: Iterable[Page]) -> str:
    """The command that applies the pages which build kernels with the flag."""
    merging = [page.patch for page in pages if "shared_memory_merge" in page.patch.provides]
    gates = dict.fromkeys(patch.gate for patch in merging if patch.gate is not None)
    if not gates:
        return "add the flag to the pass_configs of the kernel"
    switches = " ".join(f"{gate}=1" for gate in gates)
    return f"{switches} python -m cppmega.apply_patches, and start with that variable"


def _packages(root: Path) -> list[Path]:
    """Folders of the packages whose kernels a run may import."""
    mamba = root / "mamba_ssm"
    folders = [root / "megatron", mamba if mamba.is_dir() else folder_of("mamba_ssm"), PACKAGE]
    return [folder for folder in folders if folder is not None]
