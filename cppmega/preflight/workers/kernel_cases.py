"""Our fused kernels on a GPU beside their plain references on the CPU: how far are they apart?

Shapes are small but exceed a block in every dimension; the upstream gradient differs per value and
is zero in some rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cppmega.ops import (
    dsa_attention,
    dsa_indexer,
    m2rnn,
    mamba3,
    mhc,
    ngram_hash,
    packed_conv,
)
from cppmega.ops.dsa_indexer.problem import Loss
from cppmega.ops.linear_cross_entropy import linear_cross_entropy
from cppmega.ops.pointwise import dsa_indexer_prologue, hadamard
from cppmega.preflight.messages import SparseAttention

Case = Callable[[str], float]
"""Called with a device: the largest relative L2 distance of a result or gradient there."""


def kernels(attentions: Sequence[SparseAttention] = ()) -> dict[str, Case]:
    """Every kernel; those of the sparse attention at these sizes."""
    return {
        "linear cross-entropy (triton), any upstream gradient": partial(
            _cross_entropy, upstream="arbitrary"
        ),
        "linear cross-entropy (triton), weighted scalar": partial(
            _cross_entropy, upstream="weighted-scalar"
        ),
        "walsh-hadamard transform": _hadamard,
        "DSA indexer, prologue": _indexer_prologue,
        "DSA indexer, dense loss": partial(_indexer_loss, sparse=False, key_heads=1),
        "DSA indexer, sparse loss": partial(_indexer_loss, sparse=True, key_heads=1),
        "DSA indexer, sparse loss, a key per head": partial(
            _indexer_loss, sparse=True, key_heads=4
        ),
        **{name: case for sizes in attentions for name, case in _attentions(sizes).items()},
        "hyper-connections": _hyper_connection,
        "Mamba-3": _mamba3,
        "M2RNN": _m2rnn,
        "packed convolution": _packed_conv,
        "n-gram tables": _ngram_tables,
    }


def _cross_entropy(device: str, upstream: Any) -> float:
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
        loss = linear_cross_entropy(
            mine,
            its_weight,
            targets,
            upstream=upstream,
            loss_weights=factors if upstream == "weighted-scalar" else None,
            backend=backend,
        ).loss
        torch.autograd.backward(loss, factors * 3)
        results.append([loss.detach(), _gradient(mine), _gradient(its_weight)])
    return _farthest(*results)


def _hadamard(device: str) -> float:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < x.shape[1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return _distance(hadamard.walsh_hadamard(x, 0.5), 0.5 * x.float() @ matrix)


def _indexer_prologue(device: str) -> float:
    half = torch.rand(100, 1, 1, 16, generator=torch.Generator().manual_seed(2))
    angles = torch.cat([half, half], -1)

    def prepared(q: Tensor, k: Tensor, weights: Tensor) -> Sequence[Tensor]:
        rotary = dsa_indexer_prologue.Rotary(angles=angles.to(q.device))
        _refuse_declined(q, dsa_indexer_prologue.obstacle(q, k, weights, rotary))
        return dsa_indexer_prologue.prepare_index_inputs(q, k, weights, rotary)

    return _apart(device, prepared, *_normal((100, 2, 8, 64), (100, 2, 64), (100, 2, 8)))


def _indexer_loss(device: str, *, sparse: bool, key_heads: int) -> float:
    query, key = _normal((150, 2, 4, 32), (150, 2, key_heads, 32))
    definition = Loss(softmax_scale=32**-0.5, coefficient=1.0, sparse=sparse)

    def loss(q: Tensor, k: Tensor, weights: Tensor) -> Sequence[Tensor]:
        _refuse_declined(q, dsa_indexer.obstacle(q, k))
        attended = query.to(q.device), key.to(q.device)
        return (dsa_indexer.indexer_loss(q, k, weights, *attended, 64, definition).loss,)

    return _apart(device, loss, *_normal((150, 2, 8, 64), (150, 2, 64), (150, 2, 8)))


def _attentions(sizes: SparseAttention) -> dict[str, Case]:
    """The kernels that attend at these sizes; only absorbed keys have another deterministic one."""
    if sizes.key_per_head:
        return {"DSA attention, a key per head": partial(_attention, sizes, repeatable=False)}
    return {
        "DSA attention, absorbed": partial(_attention, sizes, repeatable=False),
        "DSA attention, absorbed, deterministic": partial(_attention, sizes, repeatable=True),
    }


def _attention(sizes: SparseAttention, device: str, *, repeatable: bool) -> float:
    inputs = _normal(*_shapes(sizes))

    def attended(*leaves: Tensor) -> Sequence[Tensor]:
        return (_attend(sizes, leaves, repeatable=repeatable),)

    def by_head(*leaves: Tensor) -> Sequence[Tensor]:
        return (_attend_by_head(sizes, leaves, repeatable=repeatable),)

    found = _results(attended, [x.to(device) for x in inputs])
    return _farthest(found, _results(by_head, [x.float() for x in inputs]))


def _shapes(sizes: SparseAttention) -> list[tuple[int, ...]]:
    """Shapes of queries, keys, and the values unless the keys contain them."""
    queries, keys = (150, 2, sizes.heads), (150, 2, sizes.heads if sizes.key_per_head else 1)
    values = [(*keys, sizes.value_width)] if sizes.key_per_head else []
    return [(*queries, sizes.width), (*keys, sizes.width), *values]


def _attend(sizes: SparseAttention, inputs: Sequence[Tensor], *, repeatable: bool) -> Tensor:
    query, key, *values = inputs
    value = values[0] if values else sizes.value_width
    _refuse_declined(query, dsa_attention.obstacle(query, key, value))
    scale = 4 * sizes.width**-0.5  # of the halves that `_normal` gives
    chosen = _choices().to(query.device)
    return dsa_attention.sparse_attention(query, key, value, chosen, scale, repeatable=repeatable)


def _attend_by_head(
    sizes: SparseAttention, inputs: Sequence[Tensor], *, repeatable: bool
) -> Tensor:
    """The same for one head after the other: the reference copies the chosen keys of each."""
    per_head = [x.expand(-1, -1, sizes.heads, -1).split(1, 2) for x in inputs]
    outs = [_attend(sizes, one, repeatable=repeatable) for one in zip(*per_head, strict=True)]
    return torch.cat(outs, 2)


def _choices() -> Tensor:
    """Keys of each query in any order, some of them after it, with gaps and an empty row."""
    chances = torch.rand(2, 150, 150, generator=torch.Generator().manual_seed(4))
    chosen = chances.tril_().topk(80).indices.int()
    chosen[..., ::9] = -1
    chosen[:, 1] = -1
    return chosen


def _hyper_connection(device: str) -> float:
    n, width = 4, 72
    streams, out = _normal((150, 2, n, width), (150, 2, width))
    phi, bias = (x.float() for x in _normal((n * n + 2 * n, n * width), (n * n + 2 * n,)))
    gate = torch.full((1,), 0.1)

    def site(streams: Tensor, out: Tensor, phi: Tensor, bias: Tensor) -> Sequence[Tensor]:
        mine = gate.to(phi.device)
        mapping = mhc.Parameters(phi, mine, mine, mine, bias)
        x, read = mhc.read(streams, mapping, iterations=20)
        return x, mhc.write(read, out)

    return _apart(device, site, streams, out, phi, bias)


def _mamba3(device: str) -> float:
    """MIMO, with two documents, at the widths for which there are kernels of their own."""
    heads, groups, rank, states, width = 4, 2, 4, 128, 64
    of_heads, of_states = (1, 150, heads, width), (1, 150, groups, rank, states)
    tokens = _normal(of_heads, of_heads, of_states, of_states, *[(1, 150, heads)] * 3, (1, 150, 32))
    mixed = [(heads, rank, width)] * 3
    weights = _normal((heads,), (heads,), *[(heads, rank, states)] * 2, *[(states,)] * 2, *mixed)
    boundaries = torch.tensor([0, 70, 150], dtype=torch.int32)

    def scan(*leaves: Tensor) -> Sequence[Tensor]:
        inputs, parameters = mamba3.Inputs(*leaves[:8]), mamba3.Parameters(*leaves[8:])
        bounds = boundaries.to(leaves[0].device)
        return (mamba3.mixed(inputs, parameters, boundaries=bounds),)

    return _apart(device, scan, *tokens, *(1 + x.float() / 4 for x in weights))


def _m2rnn(device: str) -> float:
    heads, key, value = 3, 64, 16
    tokens = _normal((150, 2, key), (150, 2, key), (150, 2, heads, value))
    weight, decay = _normal((heads, value, value), (150, 2, heads))

    def recurrence(q: Tensor, k: Tensor, v: Tensor, w: Tensor, rates: Tensor) -> Sequence[Tensor]:
        return (m2rnn.m2rnn(q, k, v, w, -rates.exp()),)

    return _apart(device, recurrence, *tokens, weight.float(), decay.float())


def _packed_conv(device: str) -> float:
    bounds = torch.tensor([0, 70, 150])

    def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Sequence[Tensor]:
        return (packed_conv.packed_conv(x, weight, bias, bounds.to(x.device)),)

    return _apart(device, convolved, *_normal((150, 1, 200), (200, 4), (200,)))


def _ngram_tables(device: str) -> float:
    generator = torch.Generator().manual_seed(6)
    hashing = ngram_hash.hashing(orders=[2, 3], heads=2, sizes=[101, 103, 107, 109], seed=1)
    tokens = torch.randint(0, 9, (2, 150), generator=generator)  # few, so that rows repeat

    def found(table: Tensor) -> Sequence[Tensor]:
        mine = tokens.to(table.device)
        starts = torch.zeros_like(mine, dtype=torch.bool)
        rows = ngram_hash.table_rows(mine, starts, hashing.to(table.device))
        return (ngram_hash.lookup(table, rows),)

    return _apart(device, found, *_normal((420, 24)))


def _apart(device: str, compute: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> float:
    """How far results and gradients on a device are from those of the CPU's plain reference."""

    found, wanted = (_results(compute, [x.to(at) for x in inputs]) for at in (device, "cpu"))
    return _farthest(found, wanted)


def _results(compute: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """What a function computes of these inputs, and their gradients."""
    generator = torch.Generator().manual_seed(5)
    leaves = [x.clone().requires_grad_() for x in inputs]
    results = compute(*leaves)
    upstream = []
    for result in results:
        drawn = 1 + torch.randn(result.shape, generator=generator) / 2
        if drawn.ndim:
            drawn.flatten(0, -2)[::7] = 0
        upstream.append(drawn.to(result))
    torch.autograd.backward(results, upstream)
    return [*(x.detach() for x in results), *(_gradient(x) for x in leaves)]


def _normal(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    # Large enough that the softmax is not flat, small enough that no score is lost to rounding.
    return [torch.randn(shape, generator=generator).bfloat16() / 2 for shape in shapes]


def _refuse_declined(given: Tensor, obstacle: str | None) -> None:
    if given.is_cuda and obstacle is not None:
        raise ValueError(f"it is declined: {obstacle}")


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _farthest(results: list[Tensor], wanted: list[Tensor]) -> float:
    return max(_distance(mine, plain) for mine, plain in zip(results, wanted, strict=True))


def _distance(result: Tensor, wanted: Tensor) -> float:
    result, wanted = result.double().cpu(), wanted.double().cpu()
    return float((result - wanted).norm() / wanted.norm())
