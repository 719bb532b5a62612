"""On sm_120 and sm_121 every TileLang kernel that is imported merges its shared memory.

A block has 99 KiB there. Ours, Megatron's and mamba_ssm's kernels are looked at; the flag must have
the value True, its presence is not enough.
"""

from __future__ import annotations

from pathlib import Path

from cppmega import stack
from cppmega.check import Context, NotApplicable, refuse
from cppmega.checks.kernel_parity import SMALL
from cppmega.errors import CppmegaError

AFTER: tuple[str, ...] = ("one_root", "gpus")


def check(context: Context) -> str:
    """Scan the sources.

    Raises:
        CppmegaError: `shared-memory-flag`.
        NotApplicable: the GPUs have more shared memory.
    """
    architectures = context.devices.architectures
    if not architectures & SMALL:
        raise NotApplicable(f"{', '.join(sorted(architectures)) or 'no GPU'} has enough of it")
    from cppmega import smem

    found = smem.scan(_folders(context))
    refuse(
        CppmegaError(
            "shared-memory-flag",
            f"{kernel.path}:{kernel.line}: {kernel.name} is not built with "
            f"TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: True ({kernel.reason}).",
            "It may want more than the 99 KiB that a block has here, and does not start then.",
            "CPPMEGA_SMEM_MERGE=1 python -m cppmega.apply_patches, and start with that variable",
        )
        for kernel in found
        if not kernel.merged
    )
    return f"{len(found)} TileLang kernels carry the flag"


def _folders(context: Context) -> list[Path]:
    root = context.session.tree.root
    mamba = root / "mamba_ssm"
    found = [root / "megatron", mamba if mamba.is_dir() else stack.package("mamba_ssm")]
    return [folder for folder in (*found, Path(__file__).parents[1]) if folder is not None]
