"""Compare each of our fused kernels with its plain reference, on the GPU that will train.

A process of `cppmega preflight --deep` and of `cppmega verify --deep`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

from cppmega.preflight.ask import serve
from cppmega.preflight.messages import (
    KernelParity,
    ParityAnswer,
    ParityOrder,
    SharedMemory,
    SparseAttention,
)
from cppmega.preflight.workers import kernel_cases

TOLERANCE = 2e-2
"""Relative L2 distance in bf16; a wrong kernel is off by far more."""
_LIMIT = 99 * 1024
"""Dynamic shared memory of a block on sm_120 and sm_121."""


def inspect(order: ParityOrder) -> ParityAnswer:
    """Run every kernel and its reference."""
    first = first_kernel(order.device) if order.first_kernel else ""
    kernels = list(compare(order.device, order.attentions))
    return ParityAnswer(kernels, list(shared_memory()), first)


def first_kernel(device: str) -> str:
    """Run Mamba-3's TileLang kernel as the first of this process; what is wrong with its output.

    The shape is that of the report: 35 tokens and four ranks.
    """
    import torch

    try:
        from mamba_ssm.modules.mamba3 import Mamba3
    except ImportError:
        return ""  # no run uses it
    torch.manual_seed(0)
    layer = Mamba3(
        d_model=256,
        is_mimo=True,
        mimo_rank=4,
        chunk_size=16,
        device=device,
        dtype=torch.bfloat16,
    )
    largest = float(layer(torch.randn(1, 35, 256, device=device, dtype=torch.bfloat16)).abs().max())
    if not isfinite(largest):
        return "values that are not finite"
    return "" if largest else "zeros"


def compare(device: str, attentions: Sequence[SparseAttention] = ()) -> Iterator[KernelParity]:
    """Each kernel next to its reference; those of the sparse attention at these sizes."""
    for name, run in kernel_cases.kernels(attentions).items():
        try:
            error = run(device)
        except Exception as failure:
            yield KernelParity(name, None, False, f"{type(failure).__name__}: {failure}"[:500])
        else:
            # A NaN is above every tolerance, and JSON has none.
            yield KernelParity(name, error if isfinite(error) else None, error <= TOLERANCE)


def shared_memory() -> Iterator[SharedMemory]:
    """Dynamic shared memory of every compiled variant of our Triton kernels."""
    for module, name, kernel in _kernels():
        for cache in getattr(kernel, "device_caches", {}).values():
            for compiled in cache[0].values():
                taken = int(compiled.metadata.shared)
                yield SharedMemory(f"{module}.{name}", taken, taken <= _LIMIT)


def _kernels() -> Iterator[tuple[str, str, Any]]:
    """Module, name and kernel of everything that `compare` has imported."""
    for path, module in sorted(sys.modules.items()):
        below = path.removeprefix("cppmega.ops.")
        if below != path and path.endswith("_triton"):
            for name, kernel in vars(module).items():
                if name.endswith("_kernel") and kernel.__module__ == path:
                    yield below, name, kernel


if __name__ == "__main__":
    serve(ParityOrder, inspect)
