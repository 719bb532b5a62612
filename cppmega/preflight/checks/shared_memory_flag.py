"""On sm_120 and sm_121 the TileLang kernels that are imported merge their shared memory.

A block has 99 KiB there. Pages build the kernels of Megatron and of mamba_ssm with the flag, and
their proofs show that every kernel has it with the value True; its presence is not enough.
"""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.overlay.diagnose import imported_from
from cppmega.page import Page
from cppmega.preflight.checks.kernel_parity import SMALL
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, Problems
from cppmega.training.requirements import IN_THE_CODE

AFTER: tuple[str, ...] = ("one_root", "gpus", "receipt_whole")


def check(context: Context) -> Problems:
    """Ask for the pages that build kernels with the flag, where there are such kernels.

    Yields:
        `shared-memory-flag`.

    Raises:
        NotApplicable: the GPUs have more shared memory.
    """
    architectures = context.devices.architectures
    if not architectures & SMALL:
        names = ", ".join(sorted(architectures)) or "no GPU"
        raise NotApplicable(f"{names} has enough shared memory")
    states = {name: verdict.state for name, verdict in context.plan.verdicts.items()}
    merging = [
        page
        for page in context.session.pages.values()
        if "shared_memory_merge" in page.patch.provides
    ]
    for page in merging:
        if states[page.name] not in IN_THE_CODE and _has_kernels(page, context):
            yield CppmegaError(
                "shared-memory-flag",
                f"{page.name} is {states[page.name]}, so that its TileLang kernels are not built "
                "with TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: True.",
                "They may need more than the 99 KiB that a block has here, and then cannot be "
                "launched.",
                f"{page.patch.gate}=1 python -m cppmega.apply_patches, and start with that "
                "variable",
            )
    done = ", ".join(page.name for page in merging if states[page.name] in IN_THE_CODE)
    return f"the kernels carry the flag by {done}" if done else "there are no TileLang kernels"


def _has_kernels(page: Page, context: Context) -> bool:
    """Whether a run may import the kernels of a page, patched or not."""
    tree = context.session.read_tree()
    elsewhere = any(imported_from(tree, name) for name in page.patch.distributions)
    return elsewhere or all(map(context.plan.survey.exists, page.patch.feature))
