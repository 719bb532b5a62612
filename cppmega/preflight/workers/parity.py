"""Compare each of our fused kernels with its plain reference, on the GPU that will train.

A process of `cppmega preflight --deep`. Shapes are small but cross a block in every direction; the
upstream gradient differs per row and is zero in some rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

from cppmega.preflight.ask import serve
from cppmega.preflight.messages import KernelParity, ParityAnswer, ParityOrder, SharedMemory

TOLERANCE = 2e-2
"""Relative L2 distance in bf16; a wrong kernel is off by far more."""
_LIMIT = 99 * 1024
"""Dynamic shared memory of a block on sm_120 and sm_121."""


def inspect(order: ParityOrder) -> ParityAnswer:
    """Run every kernel and its reference."""
    return ParityAnswer(list(compare(order.device)), list(shared_memory()))


def compare(device: str) -> Iterator[KernelParity]:
    """Each kernel next to its reference."""
    kernels: dict[str, Callable[[str], float]] = {
        "linear cross-entropy (triton), any upstream gradient": _any_upstream,
        "linear cross-entropy (triton), weighted scalar": _weighted_scalar,
        "walsh-hadamard transform": _hadamard,
    }
    for name, run in kernels.items():
        try:
            error = run(device)
        except Exception as failure:
            yield KernelParity(name, None, False, f"{type(failure).__name__}: {failure}"[:500])
        else:
            # A NaN is above every tolerance, and JSON has none.
            yield KernelParity(name, error if isfinite(error) else None, error <= TOLERANCE)


def _any_upstream(device: str) -> float:
    return _cross_entropy(device, "arbitrary")


def _weighted_scalar(device: str) -> float:
    return _cross_entropy(device, "weighted-scalar")


def _cross_entropy(device: str, upstream: Any) -> float:
    import torch

    from cppmega.ops.linear_cross_entropy import linear_cross_entropy

    generator = torch.Generator().manual_seed(0)
    rows, width, columns = 300, 128, 1100
    hidden = torch.randn(rows, width, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(columns, width, generator=generator).to(device, torch.bfloat16) / 8
    targets = torch.randint(0, columns, (rows,), generator=generator).to(device)
    targets[::7] = -100
    factors = torch.rand(rows, generator=generator).to(device)
    factors[::5] = 0
    results = []
    for backend in ("triton", "reference"):
        mine, its_weight = (x.detach().requires_grad_() for x in (hidden, weight))
        weights = factors if upstream == "weighted-scalar" else None
        loss = linear_cross_entropy(
            mine,
            its_weight,
            targets,
            upstream=upstream,
            loss_weights=weights,
            backend=backend,
        ).loss
        torch.autograd.backward(loss, factors * 3)
        results.append([loss.detach(), mine.grad, its_weight.grad])
    return max(_distance(found, plain) for found, plain in zip(*results, strict=True))


def _hadamard(device: str) -> float:
    import torch

    from cppmega.ops.hadamard import walsh_hadamard

    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < x.shape[1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return _distance(walsh_hadamard(x, 0.5), 0.5 * x.float() @ matrix)


def _distance(found: Any, wanted: Any) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm())


def shared_memory() -> Iterator[SharedMemory]:
    """Dynamic shared memory of every compiled variant of our Triton kernels."""
    from cppmega.ops import linear_cross_entropy_triton as kernels

    for name in ("_row_kernel", "_scale_kernel"):
        caches = getattr(getattr(kernels, name), "device_caches", {})
        for cache in caches.values():
            for compiled in cache[0].values():
                taken = int(compiled.metadata.shared)
                yield SharedMemory(name, taken, taken <= _LIMIT)


if __name__ == "__main__":
    serve(ParityOrder, inspect)
