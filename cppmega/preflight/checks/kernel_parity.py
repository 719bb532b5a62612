"""Each of our fused kernels agrees with its plain reference on this GPU.

Runs with `--deep`, and always on sm_120 and sm_121, where the shared memory of the compiled kernels
is checked as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from cppmega.errors import CppmegaError
from cppmega.preflight.ask import ask
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, refuse
from cppmega.preflight.messages import ParityAnswer, ParityOrder

AFTER: tuple[str, ...] = ("gpus", "kernels")

SMALL = {"sm_120", "sm_121"}
"""Architectures that give a block 99 KiB of dynamic shared memory."""


def check(context: Context) -> str:
    """Run every kernel and its reference in a process of its own.

    Raises:
        CppmegaError: `kernel-differs`, `shared-memory-too-large`.
        NotApplicable: there is no GPU, or `--deep` was not asked for.
    """
    devices = context.devices
    if not devices.found:
        raise NotApplicable("there is no GPU")
    if not context.deep and not devices.architectures & SMALL:
        raise NotApplicable("--deep runs every kernel against its reference")
    order = ParityOrder(device="cuda")
    answer = ask("cppmega.preflight.workers.parity", order, ParityAnswer, context.environ)
    refuse(wrong_kernels(answer, devices.architectures))
    return ", ".join(f"{one.kernel} {one.error:.1e}" for one in answer.kernels)


def wrong_kernels(answer: ParityAnswer, architectures: set[str]) -> Iterator[CppmegaError]:
    """Kernels that compute something else, or do not fit on these GPUs."""
    for one in answer.kernels:
        if not one.ok:
            far = "not finite" if one.error is None else f"off by {one.error} of its norm"
            yield CppmegaError(
                "kernel-differs",
                f"{one.kernel}: {one.why or f'compared to the reference, the result is {far}.'}",
                "Training with it would go wrong, slowly and without an error.",
                "report it with the GPU, torch and triton; to train without it: "
                "CPPMEGA_LINEAR_CE_KERNEL=reference, or cppmega revert the patch that calls it",
            )
    for compiled in answer.shared if architectures & SMALL else ():
        if not compiled.ok:
            yield CppmegaError(
                "shared-memory-too-large",
                f"{compiled.kernel} was compiled for {compiled.bytes} bytes of shared memory; "
                "a block has 101376 here.",
                "It does not start on this GPU.",
                "report it with the GPU, torch and triton",
            )
