"""Each fused kernel of ours computes on this GPU what its plain reference computes.

Runs with `--deep`, and always on sm_120 and sm_121: there the shared memory of what was compiled
is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cppmega.errors import CppmegaError
from cppmega.preflight.ask import ask
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, refuse

AFTER: tuple[str, ...] = ("gpus", "kernels")

SMALL = {"sm_120", "sm_121"}
"""Architectures with 99 KiB of dynamic shared memory for a block."""


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
    answer = ask("cppmega.preflight.workers.parity", {"device": "cuda"}, context.environ)
    refuse(judge(answer, devices.architectures))
    return ", ".join(f"{one['kernel']} {float(one['error']):.1e}" for one in answer["kernels"])


def judge(answer: dict[str, Any], architectures: set[str]) -> Iterator[CppmegaError]:
    """What the process found, as errors."""
    for one in answer["kernels"]:
        if not one["ok"]:
            yield CppmegaError(
                "kernel-differs",
                f"{one['kernel']}: "
                + (one["why"] or f"its result is off by {one['error']} of the reference's norm."),
                "Training with it would go wrong, slowly and without an error.",
                "report it with the GPU, torch and triton; CPPMEGA_LINEAR_CE_KERNEL=reference "
                "trains without it",
            )
    for one in answer["shared"] if architectures & SMALL else ():
        if not one["ok"]:
            yield CppmegaError(
                "shared-memory-too-large",
                f"{one['kernel']} was compiled for {one['bytes']} bytes of shared memory; "
                "a block has 101376 here.",
                "It does not start on this GPU.",
                "report it with the GPU, torch and triton",
            )
