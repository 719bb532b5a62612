"""DSA's sparse attention, absorbed and wide (576/512), on CUDA: the forward.

One program processes a query and a block of its heads, whose queries stay in shared memory. It
iterates over the chosen keys a block at a time: a gathered row is used for the scores and, with its
first columns, for the output. The softmax is online and in base 2, and so is the stored
log-sum-exp; for a row without keys it is +inf, which makes its probabilities 0 in the backward.

`dsa_attention_wide_backward_triton` is the backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.tiles_triton import LOG2_E
from cppmega.ops.dsa_attention.order_triton import bounds_of_row, visible
from cppmega.ops.dsa_attention.problem import Absorbed, Attended
from cppmega.ops.dsa_attention.wide_tiles import WideTiles, tiles_of


@triton.jit  # type: ignore[untyped-decorator]
def chosen_keys(indices, slot, topk, start, end):  # type: ignore[no-untyped-def]
    """The keys in some slots of a row; -1 for those that its query may not see."""
    at = tl.load(indices + slot, mask=slot < topk, other=-1)
    return tl.where(visible(at, start, end), at, -1).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def slots_in_use(indices, topk, start, end):  # type: ignore[no-untyped-def]
    """The slots of a row up to its last key, in blocks of 64: the first queries have few keys."""
    near = tl.arange(0, 256)
    last = tl.zeros([256], tl.int32)
    for first in range(0, topk, 256):
        slot = first + near
        last = tl.where(chosen_keys(indices, slot, topk, start, end) >= 0, slot + 1, last)
    return (tl.max(last, axis=0) + 63) // 64 * 64


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    query, key, indices, starts, ends, out, rest, lse, scale, batch, sq, sk, topk,
    q_row, q_batch, q_head, k_row, k_batch, bound_batch, bound_row,
    HEADS: tl.constexpr, BLOCKS: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    b, s_at = row // sq, row % sq
    start, end = bounds_of_row(starts, ends, b, s_at, sq, sk, bound_batch, bound_row, CAUSAL)
    heads = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = (heads < HEADS)[:, None]
    lane = tl.arange(0, KEYS)
    d = tl.arange(0, V)
    q_at = query + b * q_batch + s_at * q_row + heads[:, None] * q_head
    latent = tl.load(q_at + d[None, :], mask=inside, other=0.0)
    if R > 0:
        e = V + tl.arange(0, R)
        rotary = tl.load(q_at + e[None, :], mask=inside, other=0.0)
    key += b * k_batch
    indices += row * topk
    top = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, V], tl.float32)
    # A block's keys are loaded one block ahead, so that its gather can start one block ahead.
    at = chosen_keys(indices, lane, topk, start, end)
    for first in range(0, slots_in_use(indices, topk, start, end), KEYS):
        here = (at >= 0)[:, None]
        k_at = key + at.to(tl.int64)[:, None] * k_row
        keys = tl.load(k_at + d[None, :], mask=here, other=0.0)
        s = tl.dot(latent, tl.trans(keys), input_precision="ieee") * scale
        if R > 0:
            turned = tl.load(k_at + e[None, :], mask=here, other=0.0)
            s += tl.dot(rotary, tl.trans(turned), input_precision="ieee") * scale
        # Always true. Where one product feeds another, Triton assigns each warp group all columns
        # of the first, and both groups compute the same; it does not see through a branch, nor
        # through the separate factors of the two products above.
        if first < topk + 64:
            s = tl.where((at >= 0)[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(keys.dtype), keys, acc * shrink[:, None], input_precision="ieee")
        top = higher
        at = chosen_keys(indices, first + KEYS + lane, topk, start, end)
    # In this order the results need no more registers than the loop.
    acc /= tl.where(total > 0.0, total, 1.0)[:, None]
    first_out = (s_at * batch + b) * (HEADS * V)
    place = heads[:, None] * V + d[None, :]
    rounded = acc.to(out.dtype.element_ty)
    if REST:
        error = acc - rounded.to(tl.float32)
        tl.store(rest + first_out + place, error.to(out.dtype.element_ty), mask=inside)
    tl.store(out + first_out + place, rounded, mask=inside)
    sums = tl.where(total > 0.0, top + tl.log2(total), float("inf"))
    tl.store(lse + (s_at * batch + b) * HEADS + heads, sums, mask=heads < HEADS)


def wide_tiles(call: Absorbed) -> WideTiles:
    """The tiles of the kernels of a call."""
    return tiles_of(call.heads, call.value, call.rotary, call.gpu())


def forward(call: Absorbed, *, want_rest: bool) -> Attended:
    """Compute the attention over the chosen keys."""
    (batch, sq, sk, topk), attended = call.sizes(), Attended.empty(call, want_rest=want_rest)
    out, rest, lse = attended
    if not out.numel():
        return attended
    starts, ends, bound_strides, _ = call.bounds
    tile = wide_tiles(call).forward
    blocks = triton.cdiv(call.heads, tile.heads)
    _forward_kernel[(batch * sq * blocks,)](
        call.query, call.key, call.indices, starts, ends, out, out if rest is None else rest, lse,
        call.softmax_scale * LOG2_E, batch, sq, sk, topk, *call.strides(), *bound_strides,
        BLOCKS=blocks, BLOCK=tile.heads, KEYS=tile.keys, REST=want_rest,
        num_warps=tile.warps, num_stages=tile.stages, **call.common(),
    )  # fmt: skip
    return attended
