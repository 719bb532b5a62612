"""Each fused kernel of ours against its plain reference, on the GPU that will train.

Run as a process by `cppmega preflight --deep`; small shapes that still cross a block in every
direction, and an upstream gradient that differs per row and is zero in some.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from cppmega.preflight.ask import given_order

TOLERANCE = 2e-2
"""Relative L2 distance in bf16; what is wrong is wrong by far more."""
_LIMIT = 99 * 1024
"""Dynamic shared memory of a block on sm_120 and sm_121."""


def main() -> None:
    """Answer one order."""
    order = given_order()
    with contextlib.redirect_stdout(sys.stderr):
        answer = {"kernels": list(compare(order["device"])), "shared": list(shared_memory())}
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)


def compare(device: str) -> Iterator[dict[str, Any]]:
    """Name, error and what went wrong, for each kernel."""
    kernels: dict[str, Callable[[str], float]] = {
        "linear cross-entropy (triton), any upstream gradient": _any_upstream,
        "linear cross-entropy (triton), weighted scalar": _weighted_scalar,
        "walsh-hadamard transform": _hadamard,
    }
    for name, run in kernels.items():
        try:
            error, why = run(device), ""
        except Exception as failure:
            error, why = float("inf"), f"{type(failure).__name__}: {failure}"[:500]
        # A NaN is above every tolerance.
        good = error <= TOLERANCE
        yield {"kernel": name, "error": str(error), "ok": good, "why": why}


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


def shared_memory() -> Iterator[dict[str, Any]]:
    """Dynamic shared memory of every Triton kernel of ours that ran, as it was compiled."""
    from cppmega.ops import linear_cross_entropy_triton as kernels

    for name in ("_row_kernel", "_scale_kernel"):
        caches = getattr(getattr(kernels, name), "device_caches", {})
        for cache in caches.values():
            for compiled in cache[0].values():
                taken = int(compiled.metadata.shared)
                yield {"kernel": name, "bytes": taken, "ok": taken <= _LIMIT}


if __name__ == "__main__":
    main()
