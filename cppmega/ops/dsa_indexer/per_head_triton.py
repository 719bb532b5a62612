"""The target of the sparse loss on CUDA when the attention has a key per head.

The gathered keys of a query form a matrix that all heads share only if there is one key for all of
them. With a key per head, each head would multiply by a vector, without tensor cores, and read
`topk * d` numbers of its own. So all valid keys are multiplied in tiles here, by the kernels of
`dense_triton`: once for the log-sum-exp of each head's scores over the chosen keys, which one bit
per key selects, and again for the target, of which only the values of the chosen keys are kept:
`[b, sq, topk]`. Tensor cores limit these.

`_gather_kernel` has the grid queries x batch. A program reads the indices of one query and the
target of these keys once and writes that once; its scattered reads limit it.

This is done for a part of the queries at a time: at most `G_BYTES` (512 MiB) for the target of all
keys in fp32, and 1/32 of that for the bits; the log-sum-exps, `[b, heads, sq]`, cover all parts.
4096 queries at batch size 8 are one part, which takes 4 launches and the zeroing of the bits. Every
sum has a fixed order, so the target is bitwise reproducible.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.bits_triton import Places, set_bits
from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.tiles_triton import padded
from cppmega.ops.dsa_indexer.dense_triton import AttentionTiles
from cppmega.ops.dsa_indexer.tiles_triton import IndexTiles


@on_its_device
@triton.jit
def _gather_kernel(full, indices, target, sq, topk, q0, part, rows, width, SLOTS: tl.constexpr):
    """Copy the target of one query's chosen keys, 0 where there is no key."""
    b = (tl.program_id(0) // part).to(tl.int64)
    part_row = tl.program_id(0) % part
    slot = tl.arange(0, SLOTS)
    offs = (b * sq + q0 + part_row) * topk + slot
    key_n = tl.load(indices + offs, mask=slot < topk, other=-1)
    p_sum = tl.load(full + (b * rows + part_row) * width + key_n, mask=key_n >= 0, other=0.0)
    tl.store(target + offs, p_sum, mask=slot < topk)


def _bits(index: IndexTiles, part: tuple[int, int], indices: Tensor) -> Tensor:
    """One bit per key of a part's queries, `[b, queries, words]` padded to complete tiles."""
    rows = triton.cdiv(part[1] - part[0], index.tile) * index.tile
    bits = indices.new_zeros(index.batch, rows, index.columns // index.bits)
    shape = (rows, index.columns)
    set_bits(indices, index.sk, part, index.bounds, Places(bits), bits=index.bits, shape=shape)
    return bits


def _fill(attention: AttentionTiles, part: tuple[int, int], indices: Tensor, out: Tensor) -> None:
    """Write the target of a part's queries."""
    index, topk, queries = attention.index, indices.size(-1), part[1] - part[0]
    attention.sum_exponentials(part, _bits(index, part, indices))
    full = attention.target(part)
    _gather_kernel[(index.batch * queries,)](
        full, indices, out, index.sq, topk, part[0], queries, full.size(1), index.columns,
        SLOTS=padded(topk),
    )  # fmt: skip


def target(
    index: IndexTiles, query: Tensor, key: Tensor, indices: Tensor, softmax_scale: float
) -> Tensor:
    """Attention probabilities of the chosen keys, summed over heads: `[b, sq, topk]` in fp32.

    Args:
        index: the indexer's tensors, for the bounds and the tiles.
        query: `[sq, b, heads, d]`.
        key: `[sk, b, heads, d]`.
        indices: `[b, sq, topk]` in int32, valid keys, -1 where there is none.
        softmax_scale: factor on the products.
    """
    out = torch.empty(indices.shape, dtype=torch.float32, device=query.device)
    if out.numel():
        attention = AttentionTiles(index, query, key, softmax_scale)
        for part in index.parts(out.element_size()):
            _fill(attention, part, indices, out)
    return out
