"""Hashed n-grams: the rows of their tables, and a lookup with a bitwise reproducible gradient.

A table has a prime number of rows p and one multiplier in [1, p) per token of its n-gram; an n-gram
hashes to the sum of tokens times multipliers, modulo p (Carter and Wegman, "Universal classes of
hash functions", 1979): two different n-grams share a row of one table with probability 1/p.
`naive` does the same in plain Python.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from cppmega.ops.common.dispatch import interpreted
from cppmega.ops.common.once_differentiable import once_differentiable


def hashing(orders: Sequence[int], heads: int, sizes: Sequence[int], seed: int) -> Tensor:
    """Draw the multipliers of all tables, which depend only on the arguments.

    Args:
        orders: tokens per n-gram, one number for every `heads` tables.
        heads: tables per order.
        sizes: rows of each table, starting with the heads of the first order.
        seed: selects the multipliers; torch's generators are neither read nor advanced.

    Returns:
        int64 [tables, 1 + max(orders)]: the number of rows of a table; the multiplier of an
        n-gram's last token, of the one before it, and so on; 0 where the order has no such token.

    Raises:
        ValueError: the number of sizes is not the number of orders times heads.
    """
    if len(sizes) != len(orders) * heads:
        raise ValueError(f"{len(sizes)} tables for {len(orders)} orders of {heads} heads")
    table_orders = [order for order in orders for _ in range(heads)]
    rows = [
        [
            size,
            *(_drawn(seed, table, back, size) for back in range(order)),
            *([0] * (max(orders) - order)),
        ]
        for table, (order, size) in enumerate(zip(table_orders, sizes, strict=True))
    ]
    return torch.tensor(rows, dtype=torch.int64)


def _drawn(seed: int, table: int, back: int, size: int) -> int:
    """A number in [1, size), the same on every machine and in every version of Python and torch."""
    digest = hashlib.sha256(f"{seed} {table} {back}".encode()).digest()
    return 1 + int.from_bytes(digest) % max(size - 1, 1)


def table_rows(tokens: Tensor, starts: Tensor, hashed_with: Tensor) -> Tensor:
    """The row in each table of the n-gram that ends at each token.

    Args:
        tokens: int64 [b, s], each below 2^20, so that no product exceeds 63 bits.
        starts: bool [b, s], whether a document begins at the token.
        hashed_with: the result of `hashing`, on the same device.

    Returns:
        int64 [tables, b, s]: rows of the concatenated tables, numbered from 1; 0 where the document
        has begun less than n tokens before.
    """
    sizes, multipliers = hashed_with[:, 0], hashed_with[:, 1:]
    longest = multipliers.size(1)
    sums = tokens[None] * multipliers[:, :1, None]
    begun, complete = starts, torch.ones_like(starts).expand(len(sizes), -1, -1)
    for back in range(1, longest):
        used = multipliers[:, back, None, None]
        sums = sums + _before(tokens, back)[None] * used
        complete = complete & ((used == 0) | ~begun)
        begun = begun | _before(starts, back, fill=True)
    first = sizes.cumsum(0) - sizes
    rows = sums % sizes[:, None, None] + first[:, None, None] + 1
    return rows.masked_fill(~complete, 0)


def _before(values: Tensor, back: int, fill: bool = False) -> Tensor:
    """The value some positions earlier in [b, s]."""
    here = values[:, : max(values.size(1) - back, 0)]
    return torch.nn.functional.pad(here, (min(back, values.size(1)), 0), value=fill)


def lookup(tables: Tensor, rows: Tensor) -> Tensor:
    """Read rows of a table; row 0 is not in it, reads as zeros and has no gradient.

    The gradient is summed in fp32 (fp64 for an fp64 table) and in a fixed order, also on a GPU:
    `torch.nn.functional.embedding` guarantees neither, and a frequent n-gram occurs thousands of
    times in a batch. On a CPU, and in fp64, torch reads and adds; elsewhere the kernels of
    `ngram_hash_triton` do.

    Args:
        tables: [rows, dim], of a floating-point type.
        rows: int64 of any shape, from 0 to the number of rows, which is below 2^31.

    Returns:
        [*rows, dim], of the tables' type.
    """
    return cast(Tensor, _Lookup.apply(tables, rows))


def _by_kernels(tables: Tensor) -> bool:
    return interpreted() if tables.device.type == "cpu" else tables.dtype != torch.float64


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tables: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.tables = tables.shape, tables.dtype
        ctx.by_kernels = _by_kernels(tables)
        if not ctx.by_kernels:
            return tables[(rows - 1).clamp(min=0)].masked_fill_((rows == 0).unsqueeze(-1), 0)
        from cppmega.ops.ngram_hash import kernels_triton as kernels

        out = torch.empty(*rows.shape, tables.size(1), dtype=tables.dtype, device=tables.device)
        kernels.read(tables.contiguous(), rows.flatten(), out.view(rows.numel(), out.size(-1)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        (count, dim), dtype = ctx.tables
        if not ctx.by_kernels:
            wide = torch.promote_types(dtype, torch.float32)
            sums = torch.zeros(count + 1, dim, dtype=wide, device=gradient.device)
            given = gradient.reshape(rows.numel(), dim).to(wide)
            # With accumulate=True, torch sorts stably and adds in that order.
            sums.index_put_((rows.flatten(),), given, accumulate=True)
            return sums[1:].to(dtype), None
        from cppmega.ops.ngram_hash import kernels_triton as kernels

        found = torch.zeros(count, dim, dtype=dtype, device=gradient.device)
        ascending, order = rows.flatten().int().sort(stable=True)
        kernels.add(ascending, order, gradient.reshape(rows.numel(), dim).contiguous(), found)
        return found, None
