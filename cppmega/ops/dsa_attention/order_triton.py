"""Sum the contributions of queries to the gradients of their keys, in a fixed order.

A query contributes one row to the gradient of each key it chose. With atomics the sum would depend
on the order in which programs finish, and each addition would cost a read and a write in fp32.
Here each contribution is written once, in the type of the keys, to its own slot, and a second
kernel sums the contributions of each key, which are adjacent and ordered by query:

    bits[b, key, query // 32]   which queries chose a key, one bit each
    first[b, key, query // 32]  the number of contributions before those of a word: the prefix sum
                                of the bits that are set

The slot of a pair is `first` of its word plus the number of lower bits set in it. The stored
contributions are rounded to the type of the keys (not rounded for wide keys), and summed in fp32.

- `_bits_kernel`: grid queries x batch. A program reads the indices of its query once and sets one
  bit for each by an atomic or.
- `_count_kernel`: grid blocks of BLOCK words, each read once; their counts are written once.
- `_sum_kernel`: grid (keys x batch, blocks of COLUMNS). A program holds one fp32 sum per column,
  reads the contributions to its key once, ROWS at a time, and writes the gradient once. It takes
  most of the time and runs at the rate of HBM on an H200
  (`benchmarks/results/dsa_attention_designs.md`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.tiles_triton import padded
from cppmega.ops.dsa_attention.problem import Absorbed


@triton.jit
def visible(key, start, end):
    """Whether an entry of the indices is a key that its query may see."""
    return (key >= start) & (key < end)


@triton.jit
def bounds_of_row(starts, ends, b, row, sq, sk, bound_batch, bound_row, CAUSAL: tl.constexpr):
    """The first key that a query may see, and the key after the last."""
    if CAUSAL:
        start = 0
        end = (row + 1 + sk - sq).to(tl.int32)
    else:
        at = b.to(tl.int64) * bound_batch + row.to(tl.int64) * bound_row
        start = tl.maximum(tl.load(starts + at), 0).to(tl.int32)
        end = tl.load(ends + at).to(tl.int32)
    return start, tl.minimum(end, sk)


@triton.jit
def ones(word):
    """The number of bits set in each word."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def place_of(bits, first, b, key_n, part_row, mask_n, sk, words):
    """The slots, within those of batch element b, of a query's contributions to the keys `key_n`.

    b is relative to the first batch element of `bits`, and `part_row` to its first query.
    """
    origin = b.to(tl.int64) * sk * words
    word = origin + key_n.to(tl.int64) * words + part_row // 32
    lower = tl.load(bits + word, mask=mask_n, other=0) & ((1 << (part_row % 32)) - 1)
    return tl.load(first + word, mask=mask_n, other=0) - tl.load(first + origin) + ones(lower)


@on_its_device
@triton.jit
def _bits_kernel(
    indices, starts, ends, bound_batch, bound_row, bits, sq, sk, topk, q0, part, words,
    SLOTS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Set the bit of one query for each of its keys; the bits must be zero before."""
    part_row = tl.program_id(0) % part
    b, row = tl.program_id(0) // part, q0 + part_row
    start, end = bounds_of_row(starts, ends, b, row, sq, sk, bound_batch, bound_row, CAUSAL)
    slot = tl.arange(0, SLOTS)
    row_indices = indices + (b.to(tl.int64) * sq + row) * topk
    key_n = tl.load(row_indices + slot, mask=slot < topk, other=-1).to(tl.int32)
    word = bits + (b.to(tl.int64) * sk + key_n) * words + part_row // 32
    bit = tl.full([SLOTS], 1, tl.int32) << (part_row % 32)
    tl.atomic_or(word, bit, mask=visible(key_n, start, end), sem="relaxed")


@on_its_device
@triton.jit
def _count_kernel(bits, counts, words, BLOCK: tl.constexpr):
    """Count the bits set in each word."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        counts + offs, ones(tl.load(bits + offs, mask=offs < words, other=0)), mask=offs < words
    )


@on_its_device
@triton.jit
def _sum_kernel(
    contributions, first, total, sk, words, b0, region, out_row, out_batch,
    EACH: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Sum the contributions to one key, `EACH` per pair; each batch element has its own region."""
    part_b = (tl.program_id(0) // sk).to(tl.int64)
    key = (tl.program_id(0) % sk).to(tl.int64)
    origin = (b0 + part_b) * sk * words
    begin = tl.load(first + origin + key * words) - tl.load(first + origin)
    end = tl.load(first + origin + (key + 1) * words) - tl.load(first + origin)
    offs_d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    offs_n = tl.arange(0, ROWS)
    ptrs = contributions + (part_b * region + begin) * EACH * D
    acc = tl.zeros([COLUMNS], tl.float32)
    for at in range(0, (end - begin) * EACH, ROWS):
        contribution = tl.load(
            ptrs + (at + offs_n).to(tl.int64)[:, None] * D + offs_d[None, :],
            mask=(at + offs_n < (end - begin) * EACH)[:, None] & (offs_d < D)[None, :],
            other=0.0,
        )
        acc += tl.sum(contribution.to(tl.float32), axis=0)
    total_ptrs = total + key * out_row + part_b * out_batch + offs_d
    if ADD:
        acc += tl.load(total_ptrs, mask=offs_d < D, other=0.0)
    tl.store(total_ptrs, acc.to(total.dtype.element_ty), mask=offs_d < D)


class Order:
    """The slots of the contributions of some of a call's queries.

    Args:
        call: the call.
        queries: first query, and the query after the last.
    """

    def __init__(self, call: Absorbed, queries: tuple[int, int]) -> None:
        batch, sq, self.sk, topk = call.sizes()
        count = queries[1] - queries[0]
        self.words = triton.cdiv(count, 32)
        self.bits = call.indices.new_zeros(batch, self.sk, self.words, dtype=torch.int32)
        size = self.bits.numel()
        _bits_kernel[(batch * count,)](
            call.indices, *call.bounds[:2], *call.bounds.strides, self.bits,
            sq, self.sk, topk, queries[0], count, self.words,
            SLOTS=padded(topk), CAUSAL=call.causal,
        )  # fmt: skip
        counts = torch.empty_like(self.bits)
        _count_kernel[(triton.cdiv(size, 1024),)](self.bits, counts, size, BLOCK=1024)
        self.first = counts.new_zeros(size + 1)
        torch.cumsum(counts.view(-1), 0, dtype=torch.int32, out=self.first[1:])

    def add_up(
        self, contributions: Tensor, b0: int, b1: int, region: int, total: Tensor, *, add: bool
    ) -> None:
        """Write the gradient of the keys of a range of the batch, or add to it.

        Args:
            contributions: `[b1 - b0, region, each, d]`, in the slots of `place_of`.
            b0: the first batch element.
            b1: the batch element after the last.
            region: the number of slots of a batch element.
            total: `[sk, b1 - b0, d]`.
            add: add to the contents of `total` instead of overwriting them.
        """
        each, width = contributions.shape[-2:]
        columns = min(128, int(triton.next_power_of_2(width)))
        _sum_kernel[((b1 - b0) * self.sk, triton.cdiv(width, columns))](
            contributions, self.first, total, self.sk, self.words, b0, region, *total.stride()[:2],
            EACH=each, D=width, COLUMNS=columns, ROWS=128, ADD=add, num_warps=1,
        )  # fmt: skip
