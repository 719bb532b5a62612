"""Compare each of our fused kernels with its plain reference, on the GPU that will train.

A process of `cppmega preflight --deep`. Shapes are small but exceed a block in every dimension; the
upstream gradient differs per row and is zero in some rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
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

TOLERANCE = 2e-2
"""Relative L2 distance in bf16; a wrong kernel is off by far more."""
_LIMIT = 99 * 1024
"""Dynamic shared memory of a block on sm_120 and sm_121."""


def inspect(order: ParityOrder) -> ParityAnswer:
    """Run every kernel and its reference."""
    first = first_kernel(order.device) if order.first_kernel else ""
    kernels = list(compare(order.device, order.attention))
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


def compare(device: str, attention: SparseAttention | None = None) -> Iterator[KernelParity]:
    """Each kernel next to its reference; those of the sparse attention only where it has sizes."""
    kernels: dict[str, Callable[[str], float]] = {
        "linear cross-entropy (triton), any upstream gradient": _any_upstream,
        "linear cross-entropy (triton), weighted scalar": _weighted_scalar,
        "walsh-hadamard transform": _hadamard,
        "DSA indexer, prologue": _indexer_prologue,
        "DSA indexer, dense loss": partial(_indexer_loss, sparse=False, key_heads=1),
        "DSA indexer, sparse loss": partial(_indexer_loss, sparse=True, key_heads=1),
        "DSA indexer, sparse loss, a key per head": partial(
            _indexer_loss, sparse=True, key_heads=4
        ),
        **_attentions(attention),
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
    return _farthest(*results)


def _hadamard(device: str) -> float:
    import torch

    from cppmega.ops.pointwise.hadamard import walsh_hadamard

    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < x.shape[1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return _distance(walsh_hadamard(x, 0.5), 0.5 * x.float() @ matrix)


def _indexer_prologue(device: str) -> float:
    import torch

    from cppmega.ops.pointwise import dsa_indexer_prologue as op

    made = _normal((100, 2, 8, 64), (100, 2, 64), (100, 2, 8))
    angles = torch.rand(100, 1, 1, 16, generator=torch.Generator().manual_seed(2))

    def run(where: str) -> list[Any]:
        q, k, weights = leaves = [x.to(where).clone().requires_grad_() for x in made]
        rotary = op.Rotary(angles=torch.cat([angles, angles], -1).to(where))
        _refuse_declined(where, op.obstacle(q, k, weights, rotary))
        ready = op.prepare_index_inputs(q, k, weights, rotary)
        torch.autograd.backward(ready, [x.to(where) for x in made])
        return [*(x.detach() for x in ready), *(x.grad for x in leaves)]

    return _farthest(run(device), run("cpu"))  # there, the plain reference computes


def _indexer_loss(device: str, *, sparse: bool, key_heads: int) -> float:
    import torch

    from cppmega.ops import dsa_indexer as op
    from cppmega.ops.dsa_indexer.problem import Loss

    index = (150, 2, 8, 64), (150, 2, 64), (150, 2, 8)
    made = _normal(*index, (150, 2, 4, 32), (150, 2, key_heads, 32))
    loss = Loss(softmax_scale=32**-0.5, coefficient=1.0, sparse=sparse)

    def run(where: str) -> list[Any]:
        q, k, weights, query, key = (x.to(where).clone() for x in made)
        leaves = [x.requires_grad_() for x in (q, k, weights)]
        _refuse_declined(where, op.obstacle(q, k))
        value = op.indexer_loss(q, k, weights, query, key, 64, loss).loss
        torch.autograd.backward(value, value.new_full((), 3.0))
        return [value.detach(), *(x.grad for x in leaves)]

    return _farthest(run(device), run("cpu"))  # there, the plain reference computes


def _attentions(sizes: SparseAttention | None) -> dict[str, Callable[[str], float]]:
    """The kernels that attend at these sizes; only absorbed keys have another deterministic one."""
    if sizes is None:
        return {}
    if sizes.key_per_head:
        return {"DSA attention, a key per head": partial(_attention, sizes, repeatable=False)}
    return {
        "DSA attention, absorbed": partial(_attention, sizes, repeatable=False),
        "DSA attention, absorbed, deterministic": partial(_attention, sizes, repeatable=True),
    }


def _attention(sizes: SparseAttention, device: str, *, repeatable: bool) -> float:
    import torch

    *inputs, upstream = _normal(*_shapes(sizes))
    upstream[::7] = 0

    def run(made: list[Any], attend: Callable[..., Any]) -> list[Any]:
        leaves = [x.clone().requires_grad_() for x in made]
        out = attend(sizes, leaves, repeatable=repeatable)
        torch.autograd.backward(out, upstream.to(out))
        return [out.detach(), *(x.grad for x in leaves)]

    results = run([x.to(device) for x in inputs], _attend)
    return _farthest(results, run([x.float() for x in inputs], _attend_by_head))


def _shapes(sizes: SparseAttention) -> list[tuple[int, ...]]:
    """Shapes of queries, keys, the values unless the keys contain them, and the output."""
    queries, keys = (150, 2, sizes.heads), (150, 2, sizes.heads if sizes.key_per_head else 1)
    values = [(*keys, sizes.value_width)] if sizes.key_per_head else []
    return [(*queries, sizes.width), (*keys, sizes.width), *values, (*queries, sizes.value_width)]


def _attend(sizes: SparseAttention, inputs: list[Any], *, repeatable: bool) -> Any:
    from cppmega.ops import dsa_attention as op

    query, key, value = inputs if sizes.key_per_head else (*inputs, sizes.value_width)
    _refuse_declined(query.device.type, op.obstacle(query, key, value))
    scale = 4 * sizes.width**-0.5  # of the halves that `_normal` gives
    chosen = _choices().to(query.device)
    return op.sparse_attention(query, key, value, chosen, scale, repeatable=repeatable)


def _attend_by_head(sizes: SparseAttention, inputs: list[Any], *, repeatable: bool) -> Any:
    """The same for one head after the other: the reference copies the chosen keys of each."""
    import torch

    per_head = [x.expand(-1, -1, sizes.heads, -1).split(1, 2) for x in inputs]
    outs = [_attend(sizes, list(one), repeatable=repeatable) for one in zip(*per_head, strict=True)]
    return torch.cat(outs, 2)


def _choices() -> Any:
    """Keys of each query in any order, some of them after it, with gaps and an empty row."""
    import torch

    chances = torch.rand(2, 150, 150, generator=torch.Generator().manual_seed(4))
    chosen = chances.tril_().topk(80).indices.int()
    chosen[..., ::9] = -1
    chosen[:, 1] = -1
    return chosen


def _normal(*shapes: tuple[int, ...]) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(3)
    # Large enough that the softmax is not flat, small enough that no score is lost to rounding.
    return [torch.randn(shape, generator=generator).bfloat16() / 2 for shape in shapes]


def _refuse_declined(device: str, obstacle: str | None) -> None:
    if device != "cpu" and obstacle is not None:
        raise ValueError(f"it is declined: {obstacle}")


def _farthest(results: list[Any], wanted: list[Any]) -> float:
    return max(_distance(mine, plain) for mine, plain in zip(results, wanted, strict=True))


def _distance(result: Any, wanted: Any) -> float:
    result, wanted = result.double().cpu(), wanted.double().cpu()
    return float((result - wanted).norm() / wanted.norm())


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
