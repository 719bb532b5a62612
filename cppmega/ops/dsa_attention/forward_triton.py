"""The forward of DSA's absorbed sparse attention on CUDA.

Grid: (queries x batch, blocks of heads). A latent key is [latent | rotary], and its latent part is
also the value. A program holds the Q of its heads, m_i, l_i and acc `[V, BLOCK_H]` in fp32. It
gathers the chosen keys once, BLOCK_N at a time, prefetching the next block while it processes the
current one, and writes O and the log-sum-exps once. Latency limits it: registers decide how many
programs share an SM to hide it, so blocks of 64 keys are faster than larger ones
(`benchmarks/results/dsa_attention_designs.md`).

Products are keys by heads, `S^T = K Q^T` and `O^T = V^T P^T`: a tensor core's tile has 64 rows,
which the chosen keys fill but the heads of a rank often do not.

If gradients are needed, P enters its product as two terms in the input's type, and the rounding
error of the output is written as `rest`. Delta, which the backward subtracts, is the product of O
and dO; where one score is far above the others, dS is a small difference of large numbers, and the
error of a delta computed from the rounded output would dominate it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from cppmega.ops.common.device import Gpu
from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.tiles_triton import LOG2_E, padded, rows_of
from cppmega.ops.dsa_attention.order_triton import bounds_of_row, visible
from cppmega.ops.dsa_attention.problem import Absorbed, Attended

WARPS = 4
"""Warps of a program in forward and backward: one warp group computes the rows of a product."""


class Tiles(NamedTuple):
    """The tile sizes of a program.

    Attributes:
        keys: chosen keys per block.
        heads: heads per program.
        stages: blocks of keys in flight or being processed.
    """

    keys: int
    heads: int
    stages: int


def tiles_of(heads: int, width: int, gpu: Gpu) -> Tiles:
    """The tiles of forward and backward; `width` is the padded latent and rotary width."""
    if width > 128 and gpu.capability[0] != 9:
        return Tiles(32, min(16, padded(heads)), 1)
    # Without a prefetched stage, Triton 3.6 compiles products for sm_90 that read beyond the shared
    # memory of a block.
    return Tiles(64, min(32, padded(heads)), 2)


@on_its_device
@triton.jit
def _forward_kernel(
    query, key, indices, starts, ends, bound_batch, bound_row, out, rest, lse, scale, sq, sk, topk,
    batch, q_row, q_batch, q_head, k_row, k_batch,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    R: tl.constexpr, R_PAD: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """O of one query and a block of heads, its rounding error, and the log-sum-exps in base 2."""
    b = (tl.program_id(0) // sq).to(tl.int64)
    row = (tl.program_id(0) % sq).to(tl.int64)
    start, end = bounds_of_row(starts, ends, b, row, sq, sk, bound_batch, bound_row, CAUSAL)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_n = tl.arange(0, BLOCK_N)
    row_indices = indices + (b * sq + row) * topk
    key += b * k_batch
    q_ptr = query + row * q_row + b * q_batch
    q_latent = rows_of(q_ptr, offs_h, q_head, offs_h < HEADS, V, V_PAD)
    if R > 0:
        q_rotary = rows_of(q_ptr + V, offs_h, q_head, offs_h < HEADS, R, R_PAD)
    m_i = tl.full([BLOCK_H], -3.0e38, tl.float32)
    l_i = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([V_PAD, BLOCK_H], tl.float32)
    for first in range(0, topk, BLOCK_N):
        key_n = tl.load(row_indices + first + offs_n, mask=first + offs_n < topk, other=-1).to(
            tl.int32
        )
        mask_n = visible(key_n, start, end)
        k_latent = rows_of(key, key_n, k_row, mask_n, V, V_PAD)
        s = tl.dot(k_latent, tl.trans(q_latent), input_precision="ieee")
        if R > 0:
            k_rotary = rows_of(key + V, key_n, k_row, mask_n, R, R_PAD)
            s = tl.dot(k_rotary, tl.trans(q_rotary), s, input_precision="ieee")
        s = tl.where(mask_n[:, None], s * scale, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=0))
        p = tl.exp2(s - m_new[None, :])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, axis=0)
        high = p.to(k_latent.dtype)
        acc = tl.dot(tl.trans(k_latent), high, acc * alpha[None, :], input_precision="ieee")
        if REST:
            low = (p - high.to(tl.float32)).to(k_latent.dtype)
            acc = tl.dot(tl.trans(k_latent), low, acc, input_precision="ieee")
        m_i = m_new
    has_keys = l_i > 0.0
    acc = acc * tl.where(has_keys, 1.0 / tl.where(has_keys, l_i, 1.0), 0.0)[None, :]
    offs_lse = (row * batch + b) * HEADS + offs_h
    # An infinite log-sum-exp makes all probabilities zero in a row without keys.
    lse_i = tl.where(has_keys, m_i + tl.log2(tl.where(has_keys, l_i, 1.0)), float("inf"))
    tl.store(lse + offs_lse, lse_i, mask=offs_h < HEADS)
    offs_v = tl.arange(0, V_PAD)
    offs_o = offs_lse[None, :] * V + offs_v[:, None]
    mask_o = (offs_h < HEADS)[None, :] & (offs_v < V)[:, None]
    rounded = acc.to(out.dtype.element_ty)
    tl.store(out + offs_o, rounded, mask=mask_o)
    if REST:
        tl.store(
            rest + offs_o, (acc - rounded.to(tl.float32)).to(rest.dtype.element_ty), mask=mask_o
        )


def forward(call: Absorbed, *, want_rest: bool) -> Attended:
    """Compute the attention over the chosen keys."""
    (batch, sq, sk, topk), attended = call.sizes(), Attended.empty(call, want_rest=want_rest)
    out, rest, lse = attended
    pads = padded(call.value), padded(call.rotary)
    tiles = tiles_of(call.heads, sum(pads), call.gpu())
    if out.numel():
        _forward_kernel[(batch * sq, triton.cdiv(call.heads, tiles.heads))](
            call.query, call.key, call.indices, *call.bounds[:2], *call.bounds.strides,
            out, out if rest is None else rest, lse, call.softmax_scale * LOG2_E,
            sq, sk, topk, batch, *call.strides(), BLOCK_H=tiles.heads, V_PAD=pads[0], R_PAD=pads[1],
            BLOCK_N=tiles.keys, REST=want_rest, **call.common(),
            num_warps=WARPS, num_stages=tiles.stages,
        )  # fmt: skip
    return attended
