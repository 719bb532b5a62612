"""The forward of DSA's absorbed sparse attention for wide latents (576/512) on CUDA.

Grid: queries x batch x blocks of heads. A program holds the Q of its heads in shared memory, and
m_i, l_i and acc `[BLOCK_H, V]` in fp32. It gathers each chosen key once, BLOCK_N at a time, for the
scores and, with its first columns, for the output; O, its rounding error if gradients are needed,
and the log-sum-exps are written once. The softmax is online and in base 2, and so is the stored
log-sum-exp; for a row without keys it is +inf, which makes its probabilities 0 in the backward.

Tensor cores limit it, and they idle during the softmax, which Triton puts between the two products
of a block: on an H200 the products run at about 260 TFLOP/s at 4096 tokens and at 335 at 32768
(`benchmarks/results/dsa_attention_designs.md`).

`wide_backward_triton` is the backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.tiles_triton import LOG2_E
from cppmega.ops.dsa_attention.order_triton import bounds_of_row, visible
from cppmega.ops.dsa_attention.problem import Absorbed, Attended
from cppmega.ops.dsa_attention.wide_tiles import WideTiles, tiles_of


@triton.jit
def chosen_keys(indices, slot, topk, start, end):
    """The keys in some slots of a row; -1 for those that its query may not see."""
    at = tl.load(indices + slot, mask=slot < topk, other=-1)
    return tl.where(visible(at, start, end), at, -1).to(tl.int32)


@triton.jit
def slots_in_use(indices, topk, start, end):
    """The slots of a row up to its last key, in blocks of 64: the first queries have few keys."""
    near = tl.arange(0, 256)
    last = tl.zeros([256], tl.int32)
    for first in range(0, topk, 256):
        slot = first + near
        last = tl.where(chosen_keys(indices, slot, topk, start, end) >= 0, slot + 1, last)
    return (tl.max(last, axis=0) + 63) // 64 * 64


@on_its_device
@triton.jit
def _forward_kernel(
    query, key, indices, starts, ends, out, rest, lse, scale, batch, sq, sk, topk,
    q_row, q_batch, q_head, k_row, k_batch, bound_batch, bound_row,
    HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """O of one query and a block of heads, its rounding error, and the log-sum-exps in base 2."""
    bs = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    b, row = bs // sq, bs % sq
    start, end = bounds_of_row(starts, ends, b, row, sq, sk, bound_batch, bound_row, CAUSAL)
    offs_h = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = (offs_h < HEADS)[:, None]
    offs_n = tl.arange(0, BLOCK_N)
    offs_v = tl.arange(0, V)
    q_ptrs = query + b * q_batch + row * q_row + offs_h[:, None] * q_head
    q_latent = tl.load(q_ptrs + offs_v[None, :], mask=mask_h, other=0.0)
    if R > 0:
        offs_r = V + tl.arange(0, R)
        q_rotary = tl.load(q_ptrs + offs_r[None, :], mask=mask_h, other=0.0)
    key += b * k_batch
    indices += bs * topk
    m_i = tl.full([BLOCK_H], -3.0e38, tl.float32)
    l_i = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, V], tl.float32)
    # A block's keys are loaded one block ahead, so that its gather can start one block ahead.
    key_n = chosen_keys(indices, offs_n, topk, start, end)
    for first in range(0, slots_in_use(indices, topk, start, end), BLOCK_N):
        mask_n = (key_n >= 0)[:, None]
        k_ptrs = key + key_n.to(tl.int64)[:, None] * k_row
        k_latent = tl.load(k_ptrs + offs_v[None, :], mask=mask_n, other=0.0)
        s = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee") * scale
        if R > 0:
            k_rotary = tl.load(k_ptrs + offs_r[None, :], mask=mask_n, other=0.0)
            s += tl.dot(q_rotary, tl.trans(k_rotary), input_precision="ieee") * scale
        # Always true. Where one product feeds another, Triton assigns each warp group all columns
        # of the first, and both groups compute the same; it does not see through a branch, nor
        # through the separate factors of the two products above.
        if first < topk + 64:
            s = tl.where((key_n >= 0)[None, :], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(k_latent.dtype), k_latent, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
        key_n = chosen_keys(indices, first + BLOCK_N + offs_n, topk, start, end)
    # In this order the results need no more registers than the loop.
    acc /= tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    base_o = (row * batch + b) * (HEADS * V)
    offs_o = offs_h[:, None] * V + offs_v[None, :]
    rounded = acc.to(out.dtype.element_ty)
    if REST:
        residual = acc - rounded.to(tl.float32)
        tl.store(rest + base_o + offs_o, residual.to(out.dtype.element_ty), mask=mask_h)
    tl.store(out + base_o + offs_o, rounded, mask=mask_h)
    lse_i = tl.where(l_i > 0.0, m_i + tl.log2(l_i), float("inf"))
    tl.store(lse + (row * batch + b) * HEADS + offs_h, lse_i, mask=offs_h < HEADS)


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
        HEAD_BLOCKS=blocks, BLOCK_H=tile.heads, BLOCK_N=tile.keys, REST=want_rest,
        num_warps=tile.warps, num_stages=tile.stages, **call.common(),
    )  # fmt: skip
    return attended
