"""The CUDA allocator's expandable segments are on in the training process."""

from __future__ import annotations

from cppmega.errors import CppmegaError
from cppmega.host import allocator
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable


def check(context: Context) -> str:
    """Set them as `cppmega.run` does, and read them as torch will.

    Raises:
        CppmegaError: `allocator-differs`.
    """
    if context.recipe is not None and not context.needs_gpu:
        raise NotApplicable(f"{context.recipe.name} runs on CPU")
    environ = dict(context.environ)
    allocator.set_in(environ)
    read = allocator.NEW if environ.get(allocator.NEW) else allocator.OLD
    if not allocator.is_on(environ):
        raise CppmegaError(
            "allocator-differs",
            f"{read}={environ[read]} switches expandable segments off.",
            "Free memory is fragmented into gaps too small to use: the run goes out of memory with "
            "much of it free.",
            f"unset {read} (cppmega.run sets expandable_segments:True)",
        )
    return f"{read}={environ[read]}"
