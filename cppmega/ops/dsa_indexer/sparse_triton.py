"""The indexer's sparse loss on CUDA: both distributions over the chosen keys, and all gradients.

Both kernels have the grid queries x batch.

- `_target_kernel`: a program gathers the attention's chosen keys, keeps the scores of all heads on
  chip where they fit (256 keys by 32 heads) and otherwise gathers twice, and writes the
  probabilities summed over this rank's heads, `[b, sq, topk]`, once. Tensor parallelism sums these
  over the ranks. With a key per head, `per_head_triton` computes them.
- `_gradients_kernel`: a program holds Q of all heads of the indexer, and the accumulators of dQ and
  dW in fp32. It computes the loss of its row and p - t from the target and the chosen index scores,
  gathers the indexer's keys once, and writes dQ and dW once. It accumulates dK by fp32 atomics or,
  bitwise reproducibly, scatters p - t into a zeroed G, from which `tiles_triton` computes dK.

For products, p - t is split into two bf16 terms: with one, the error would be as large as that of
rounding the result itself.

Atomics limit the gradients most: on an H200 they take 0.49 of 1.23 ms. Registers limit the keys per
step (`keys_and_warps`; `benchmarks/results/dsa_indexer_designs.md`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.bounds import strides_of
from cppmega.ops.common.device import Gpu, contiguous_rows, gpu_of
from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.tiles_triton import padded, product
from cppmega.ops.dsa_indexer.naive import EPSILON
from cppmega.ops.dsa_indexer.tiles_triton import IndexTiles

_ELEMENTS = 8192
"""Scores, keys times heads, that a program of `target` holds at a time."""

KEYS = 64
"""Chosen keys that a program of `gradients` handles at a time."""


def keys_and_warps(heads: int, width: int, gpu: Gpu) -> tuple[int, int]:
    """Chosen keys per step, and warps, of a program of `gradients`.

    Compiled for sm_80, sm_100 and sm_120, 64 keys with 64 heads of 128 spill 320 to 730 bytes in
    each of 128 threads, and 32 keys none; 32 keys with 128 heads need twice as many threads.
    """
    if gpu.capability[0] == 9 or heads * width < 64 * 128:
        return KEYS, 4
    return KEYS // 2, 4 if heads <= 64 else 8


@triton.jit
def _target_scores(
    query, key, key_n, mask_n, offs_h, key_row, query_head,
    D: tl.constexpr, D_STEP: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Products `[keys, heads]` of the keys `at` with all heads of one query."""
    offs_d = tl.arange(0, D_STEP)
    s = tl.zeros([key_n.shape[0], offs_h.shape[0]], tl.float32)
    for first in range(0, D, D_STEP):
        mask_d = first + offs_d < D
        k = tl.load(
            key + key_n.to(tl.int64)[:, None] * key_row + (first + offs_d)[None, :],
            mask=mask_n[:, None] & mask_d[None, :],
            other=0.0,
        )
        q = tl.load(
            query + offs_h[None, :] * query_head + (first + offs_d)[:, None],
            mask=(offs_h < HEADS)[None, :] & mask_d[:, None],
            other=0.0,
        )
        s = tl.dot(k, q, s, input_precision="ieee")
    return s


@on_its_device
@triton.jit
def _target_kernel(
    query, key, indices, target, scale, sq, topk,
    q_row, q_batch, q_head, k_row, k_batch,
    HEADS: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_STEP: tl.constexpr,
    TOPK_PAD: tl.constexpr, BLOCK_N: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """The target of the chosen keys of one query; with ONE, all of them fit in one block."""
    row = tl.program_id(0).to(tl.int64)
    b = row // sq
    query += b * q_batch + (row % sq) * q_row
    key += b * k_batch
    offs_n = tl.arange(0, BLOCK_N)
    offs_h = tl.arange(0, H_PAD)
    m_i = tl.full([H_PAD], -3.0e38, tl.float32)
    l_i = tl.zeros([H_PAD], tl.float32)
    if ONE:
        key_n = tl.load(indices + row * topk + offs_n, mask=offs_n < topk, other=-1)
        s = _target_scores(query, key, key_n, key_n >= 0, offs_h, k_row, q_head, D, D_STEP, HEADS)
        s = tl.where((key_n >= 0)[:, None], s * scale, float("-inf"))
        m_i = tl.maximum(tl.max(s, axis=0), -3.0e38)
        p = tl.exp(s - m_i[None, :])
        l_i = tl.sum(p, axis=0)
        inv_l = tl.where(offs_h < HEADS, 1.0 / tl.maximum(l_i, 1e-37), 0.0)
        tl.store(
            target + row * topk + offs_n, tl.sum(p * inv_l[None, :], axis=1), mask=offs_n < topk
        )
    else:
        slot = tl.arange(0, TOPK_PAD)
        every = tl.load(indices + row * topk + slot, mask=slot < topk, other=-1)
        # Early rows have fewer keys than the top-k.
        end = tl.cdiv(tl.max(tl.where(every >= 0, slot, -1), axis=0) + 1, BLOCK_N) * BLOCK_N
        for first in range(0, end, BLOCK_N):
            key_n = tl.load(
                indices + row * topk + first + offs_n, mask=first + offs_n < topk, other=-1
            )
            s = _target_scores(
                query, key, key_n, key_n >= 0, offs_h, k_row, q_head, D, D_STEP, HEADS
            )
            s = tl.where((key_n >= 0)[:, None], s * scale, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(s, axis=0))
            l_i = l_i * tl.exp(m_i - m_new) + tl.sum(tl.exp(s - m_new[None, :]), axis=0)
            m_i = m_new
        inv_l = tl.where(offs_h < HEADS, 1.0 / tl.maximum(l_i, 1e-37), 0.0)
        for first in range(0, end, BLOCK_N):
            key_n = tl.load(
                indices + row * topk + first + offs_n, mask=first + offs_n < topk, other=-1
            )
            s = _target_scores(
                query, key, key_n, key_n >= 0, offs_h, k_row, q_head, D, D_STEP, HEADS
            )
            s = tl.where((key_n >= 0)[:, None], s * scale, float("-inf"))
            p = tl.exp(s - m_i[None, :]) * inv_l[None, :]
            tl.store(
                target + row * topk + first + offs_n, tl.sum(p, axis=1), mask=first + offs_n < topk
            )
        tl.store(target + row * topk + slot, 0.0, mask=(slot >= end) & (slot < topk))


def target(query: Tensor, key: Tensor, indices: Tensor, softmax_scale: float) -> Tensor:
    """Attention probabilities of the chosen keys, summed over heads: `[b, sq, topk]` in fp32.

    Args:
        query: `[sq, b, heads, d]`.
        key: `[sk, b, 1, d]`.
        indices: `[b, sq, topk]` in int32, -1 where there is no key.
        softmax_scale: factor on the products.
    """
    sq, batch, heads, width = query.shape
    topk = indices.size(-1)
    query, key = contiguous_rows(query), contiguous_rows(key)
    out = torch.empty(indices.shape, dtype=torch.float32, device=query.device)
    if not out.numel():
        return out
    h_pad = padded(heads)
    keys = min(padded(topk), max(16, _ELEMENTS // h_pad))
    step = width if width in (16, 32, 64, 128) else 64
    _target_kernel[(batch * sq,)](
        query, key, indices, out, softmax_scale, sq, topk,
        *query.stride()[:3], *key.stride()[:2],
        HEADS=heads, H_PAD=h_pad, D=width, D_STEP=step, TOPK_PAD=padded(topk), BLOCK_N=keys,
        ONE=topk <= keys, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit
def kl_terms(t, p, log_p, EPS: tl.constexpr, INSIDE_LOGS: tl.constexpr):
    """Terms of the KL divergence of one row; both distributions are zero where there is no key."""
    if INSIDE_LOGS:
        return t * (tl.log(t + EPS) - tl.log(p + EPS))
    return t * (tl.log(tl.maximum(t, EPS)) - log_p)


@on_its_device
@triton.jit
def _gradients_kernel(
    q_ptr, k_ptr, weights, indices, scores, target, rows, factor, loss_ptr, dq, dk, dw, g_out,
    sq, sk, topk, batch, q0, part, g_rows, g_width,
    q_row, q_batch, q_head, k_row, k_batch, w_row, w_batch, w_head, rows_batch, rows_row,
    HEADS: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TOPK_PAD: tl.constexpr, BLOCK_N: tl.constexpr, RELU: tl.constexpr, EPS: tl.constexpr,
    INSIDE_LOGS: tl.constexpr, ROWS: tl.constexpr, GRADIENTS: tl.constexpr, SPLIT: tl.constexpr,
    SCATTER: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """The loss of one query; with GRADIENTS, its dQ and dW, and its part of dK or of G."""
    b = (tl.program_id(0) // part).to(tl.int64)
    part_row = tl.program_id(0) % part
    row = (q0 + part_row).to(tl.int64)
    bs = b * sq + row
    slot = tl.arange(0, TOPK_PAD)
    mask = tl.load(indices + bs * topk + slot, mask=slot < topk, other=-1) >= 0
    last = tl.max(tl.where(mask, slot, -1), axis=0) + 1  # early rows have fewer keys than the top-k
    t = tl.load(target + bs * topk + slot, mask=mask, other=0.0)
    score = tl.load(scores + bs * topk + slot, mask=mask, other=float("-inf"))
    t_sum = tl.maximum(tl.sum(t, axis=0), EPS)
    m_i = tl.maximum(tl.max(score, axis=0), -3.0e38)
    lse = m_i + tl.log(tl.maximum(tl.sum(tl.exp(score - m_i), axis=0), 1e-37))
    log_p = tl.where(mask, score - lse, 0.0)
    p = tl.where(mask, tl.exp(log_p), 0.0)
    loss = tl.sum(kl_terms(t / t_sum, p, log_p, EPS, INSIDE_LOGS), axis=0)
    counts = 1.0
    if ROWS:
        counts = tl.load(rows + b * rows_batch + row * rows_row).to(tl.float32)
    tl.store(loss_ptr + bs, loss * counts)
    if GRADIENTS:
        row_factor = counts * tl.load(factor)
        offs_h = tl.arange(0, H_PAD)
        offs_d = tl.arange(0, D_PAD)
        offs_n = tl.arange(0, BLOCK_N)
        mask_h, mask_d = offs_h < HEADS, offs_d < D
        q_ptrs = q_ptr + b * q_batch + row * q_row
        q = tl.load(
            q_ptrs + offs_h[:, None] * q_head + offs_d[None, :],
            mask=mask_h[:, None] & mask_d[None, :],
            other=0.0,
        )
        w = tl.load(weights + b * w_batch + row * w_row + offs_h * w_head, mask=mask_h, other=0.0)
        w = w.to(tl.float32)
        acc_dq = tl.zeros([D_PAD, H_PAD], tl.float32)
        acc_dw = tl.zeros([H_PAD], tl.float32)
        for first in range(0, last, BLOCK_N):
            offs = bs * topk + first + offs_n
            key_n = tl.load(indices + offs, mask=first + offs_n < topk, other=-1)
            mask_n = key_n >= 0
            g = tl.exp(tl.load(scores + offs, mask=mask_n, other=float("-inf")) - lse)
            g -= tl.load(target + offs, mask=mask_n, other=0.0) / t_sum
            k = tl.load(
                k_ptr + b * k_batch + key_n.to(tl.int64)[:, None] * k_row + offs_d[None, :],
                mask=mask_n[:, None] & mask_d[None, :],
                other=0.0,
            )
            s = tl.dot(k, tl.trans(q), input_precision="ieee")
            ds = tl.zeros_like(s) + tl.where(mask_n, g, 0.0)[:, None]
            if RELU:
                ds = tl.where(s > 0.0, ds, 0.0)
            acc_dw += tl.sum(ds * s, axis=0)
            high = ds.to(k.dtype)
            acc_dq = tl.dot(tl.trans(k), high, acc_dq, input_precision="ieee")
            if SPLIT:
                low = (ds - high.to(tl.float32)).to(k.dtype)
                acc_dq = tl.dot(tl.trans(k), low, acc_dq, input_precision="ieee")
            if SCATTER:
                g_ptrs = g_out + (b * g_rows + part_row) * g_width + key_n
                tl.store(g_ptrs, (g * counts * GAIN).to(g_out.dtype.element_ty), mask=mask_n)
            else:
                zeros = tl.zeros([BLOCK_N, D_PAD], tl.float32)
                dk_n = product(ds * w[None, :], q, zeros, SPLIT) * row_factor
                tl.atomic_add(
                    dk + (b * sk + key_n)[:, None] * D + offs_d[None, :],
                    dk_n,
                    mask=mask_n[:, None] & mask_d[None, :],
                    sem="relaxed",
                )
        offs_dw = (row * batch + b) * HEADS + offs_h
        tl.store(dw + offs_dw, acc_dw * row_factor, mask=mask_h)
        tl.store(
            dq + offs_dw[None, :] * D + offs_d[:, None],
            (acc_dq * (w * row_factor)[None, :]).to(dq.dtype.element_ty),
            mask=mask_h[None, :] & mask_d[:, None],
        )


@dataclass(frozen=True)
class Sparse:
    """The sparse loss of one call.

    Attributes:
        index: the indexer's tensors.
        indices: `[b, sq, topk]` in int32.
        scores: the scores of the chosen keys, of the same shape.
        target: the target of all ranks, of the same shape, not normalized.
        rows: `[b, sq]`, whether a row counts; None: all do.
        inside_logs: the definition of the loss up to 0.18.
    """

    index: IndexTiles
    indices: Tensor
    scores: Tensor
    target: Tensor
    rows: Tensor | None
    inside_logs: bool

    def losses(self) -> Tensor:
        """The loss of each row, `[b, sq]`."""
        loss = torch.empty_like(self.scores[..., 0])
        self._launch((0, self.index.sq), loss, loss, None, None)
        return loss

    def gradients(self, factor: Tensor, *, repeatable: bool) -> tuple[Tensor, ...]:
        """The loss of each row, and dq, dk `[b, sk, d]` and dweights, multiplied by `factor`.

        dq is in the type of q (fp32 for fp16); the others are in fp32.
        """
        index = self.index
        q, weights = index.q, index.weights
        loss = torch.empty_like(self.scores[..., 0])
        dq = q.new_empty(q.shape, dtype=torch.float32 if q.dtype == torch.float16 else q.dtype)
        dw = weights.new_empty(weights.shape, dtype=torch.float32)
        if not repeatable:
            dk = q.new_zeros(index.batch, index.sk, index.width, dtype=torch.float32)
            self._launch((0, index.sq), loss, factor, (dq, dk, dw), None)
            return loss, dq, dk, dw
        groups = index.empty_gradients()[1]
        for part in index.parts():
            g = index.scratch(part, index.dtype).zero_()
            self._launch(part, loss, factor, (dq, groups, dw), g)
            index.gradient_of_keys(part, g, factor, groups)
        return loss, dq, groups.sum(0), dw

    def _launch(
        self,
        part: tuple[int, int],
        loss: Tensor,
        factor: Tensor,
        out: tuple[Tensor, Tensor, Tensor] | None,
        g: Tensor | None,
    ) -> None:
        index = self.index
        q, k, weights, topk = index.q, index.k, index.weights, self.indices.size(-1)
        topk_pad = padded(topk)
        h_pad, d_pad = padded(index.heads), padded(index.width)
        keys, warps = keys_and_warps(h_pad, d_pad, gpu_of(q.device))
        rows = part[1] - part[0]
        _gradients_kernel[(index.batch * rows,)](
            q, k, weights, self.indices, self.scores, self.target,
            loss if self.rows is None else self.rows, factor, loss,
            *(out or (loss, loss, loss)), loss if g is None else g,
            index.sq, index.sk, topk, index.batch, part[0], rows,
            0 if g is None else g.size(1), index.columns,
            *q.stride()[:3], *k.stride()[:2], *weights.stride(), *strides_of(self.rows),
            HEADS=index.heads, H_PAD=h_pad, D=index.width, D_PAD=d_pad,
            TOPK_PAD=topk_pad, BLOCK_N=min(topk_pad, keys), RELU=index.use_relu, EPS=EPSILON,
            INSIDE_LOGS=self.inside_logs, ROWS=self.rows is not None, GRADIENTS=out is not None,
            SPLIT=q.dtype != torch.float32, SCATTER=g is not None, GAIN=index.gain,
            num_warps=warps, num_stages=2,
        )  # fmt: skip
