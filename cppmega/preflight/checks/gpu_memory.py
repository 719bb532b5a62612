"""The model fits on the GPU, by estimate, before anything is launched."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.devices import gib, smallest
from cppmega.preflight.findings import NotApplicable

AFTER: tuple[str, ...] = ("gpus",)

_NEAR = 0.92
"""Share of a GPU above which fragmentation decides whether a run fits."""


def check(context: Context) -> str:
    """Compare the estimate with the smallest GPU.

    Raises:
        CppmegaError: `does-not-fit`.
    """
    if context.recipe is None or not context.needs_gpu:
        raise NotApplicable("no recipe for GPUs is named")
    one, needs = smallest(context.devices.found), context.memory
    parts = (
        f"{gib(needs.states)} of weights, gradients and optimizer, {gib(needs.activations)} of "
        f"activations, {gib(needs.logits)} of logits"
    )
    if needs.total > one.total:
        raise CppmegaError(
            "does-not-fit",
            f"Recipe {context.recipe.name} takes about {gib(needs.total)} ({parts}); "
            f"{one.name} has {gib(one.total)}.",
            "The run would end out of memory in its first step.",
            "--set micro_batch_size=..., recompute_modules, or more GPUs",
        )
    near = " (near the limit: only a trial can tell)" if needs.total > _NEAR * one.total else ""
    return f"about {gib(needs.total)} of {gib(one.total)}{near}: {parts}"
