"""The indexer's sparse loss on CUDA: both distributions over the chosen keys, and all gradients.

There is one program per query. `target` gathers the attention's chosen keys once, keeps the scores
of all heads on chip where they fit (256 keys by 32 heads), and writes the probabilities summed over
this rank's heads, `[b, sq, topk]`, which tensor parallelism sums over the ranks; with a key per
head, `dsa_indexer_per_head_triton` computes them. `gradients` reads these and the chosen index
scores, computes the loss of the row and p - t, and gathers the indexer's keys for the gradients of
q and of the head weights. The gradient of k is accumulated by fp32 atomics or, bitwise
reproducibly, by `dsa_indexer_tiles_triton` from p - t scattered into a zeroed G.

For products, p - t is split into two bf16 terms: with one, the error would be as large as that of
rounding the result itself.
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


@triton.jit  # type: ignore[untyped-decorator]
def _target_scores(  # type: ignore[no-untyped-def]
    query, key, at, there, heads, key_row, query_head,
    D: tl.constexpr, D_STEP: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Products `[keys, heads]` of the keys `at` with all heads of one query."""
    d = tl.arange(0, D_STEP)
    s = tl.zeros([at.shape[0], heads.shape[0]], tl.float32)
    for first in range(0, D, D_STEP):
        inside = first + d < D
        keys = tl.load(
            key + at.to(tl.int64)[:, None] * key_row + (first + d)[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        queries = tl.load(
            query + heads[None, :] * query_head + (first + d)[:, None],
            mask=(heads < HEADS)[None, :] & inside[:, None],
            other=0.0,
        )
        s = tl.dot(keys, queries, s, input_precision="ieee")
    return s


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _target_kernel(  # type: ignore[no-untyped-def]
    query, key, indices, target, scale, sq, topk,
    q_row, q_batch, q_head, k_row, k_batch,
    HEADS: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_STEP: tl.constexpr,
    KEYS: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // sq
    query += b * q_batch + (row % sq) * q_row
    key += b * k_batch
    lane = tl.arange(0, KEYS)
    heads = tl.arange(0, H_PAD)
    top = tl.full([H_PAD], -3.0e38, tl.float32)
    total = tl.zeros([H_PAD], tl.float32)
    if ONE:
        at = tl.load(indices + row * topk + lane, mask=lane < topk, other=-1)
        s = _target_scores(query, key, at, at >= 0, heads, k_row, q_head, D, D_STEP, HEADS)
        s = tl.where((at >= 0)[:, None], s * scale, float("-inf"))
        top = tl.maximum(tl.max(s, axis=0), -3.0e38)
        e = tl.exp(s - top[None, :])
        total = tl.sum(e, axis=0)
        share = tl.where(heads < HEADS, 1.0 / tl.maximum(total, 1e-37), 0.0)
        tl.store(target + row * topk + lane, tl.sum(e * share[None, :], axis=1), mask=lane < topk)
    else:
        for first in range(0, topk, KEYS):
            at = tl.load(indices + row * topk + first + lane, mask=first + lane < topk, other=-1)
            s = _target_scores(query, key, at, at >= 0, heads, k_row, q_head, D, D_STEP, HEADS)
            s = tl.where((at >= 0)[:, None], s * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(s, axis=0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(s - higher[None, :]), axis=0)
            top = higher
        share = tl.where(heads < HEADS, 1.0 / tl.maximum(total, 1e-37), 0.0)
        for first in range(0, topk, KEYS):
            at = tl.load(indices + row * topk + first + lane, mask=first + lane < topk, other=-1)
            s = _target_scores(query, key, at, at >= 0, heads, k_row, q_head, D, D_STEP, HEADS)
            s = tl.where((at >= 0)[:, None], s * scale, float("-inf"))
            e = tl.exp(s - top[None, :]) * share[None, :]
            tl.store(
                target + row * topk + first + lane, tl.sum(e, axis=1), mask=first + lane < topk
            )


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
        HEADS=heads, H_PAD=h_pad, D=width, D_STEP=step, KEYS=keys, ONE=topk <= keys,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def kl_terms(t, p, log_p, EPS: tl.constexpr, INSIDE_LOGS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Terms of the KL divergence of one row; both distributions are zero where there is no key."""
    if INSIDE_LOGS:
        return t * (tl.log(t + EPS) - tl.log(p + EPS))
    return t * (tl.log(tl.maximum(t, EPS)) - log_p)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _gradients_kernel(  # type: ignore[no-untyped-def]
    q, k, weights, indices, scores, target, rows, factor, loss, dq, dk, dw, g_out,
    sq, sk, topk, batch, q0, part, g_rows, g_width,
    q_row, q_batch, q_head, k_row, k_batch, w_row, w_batch, w_head, rows_batch, rows_row,
    HEADS: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TOPK_PAD: tl.constexpr, KEYS: tl.constexpr, RELU: tl.constexpr, EPS: tl.constexpr,
    INSIDE_LOGS: tl.constexpr, ROWS: tl.constexpr, GRADIENTS: tl.constexpr, SPLIT: tl.constexpr,
    SCATTER: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // part).to(tl.int64)
    near = tl.program_id(0) % part
    s_at = (q0 + near).to(tl.int64)
    row = b * sq + s_at
    slot = tl.arange(0, TOPK_PAD)
    there = tl.load(indices + row * topk + slot, mask=slot < topk, other=-1) >= 0
    share = tl.load(target + row * topk + slot, mask=there, other=0.0)
    index = tl.load(scores + row * topk + slot, mask=there, other=float("-inf"))
    whole = tl.maximum(tl.sum(share, axis=0), EPS)
    top = tl.maximum(tl.max(index, axis=0), -3.0e38)
    lse = top + tl.log(tl.maximum(tl.sum(tl.exp(index - top), axis=0), 1e-37))
    log_p = tl.where(there, index - lse, 0.0)
    p = tl.where(there, tl.exp(log_p), 0.0)
    kl = tl.sum(kl_terms(share / whole, p, log_p, EPS, INSIDE_LOGS), axis=0)
    counts = 1.0
    if ROWS:
        counts = tl.load(rows + b * rows_batch + s_at * rows_row).to(tl.float32)
    tl.store(loss + row, kl * counts)
    if GRADIENTS:
        by = counts * tl.load(factor)
        heads = tl.arange(0, H_PAD)
        d = tl.arange(0, D_PAD)
        lane = tl.arange(0, KEYS)
        head_in, d_in = heads < HEADS, d < D
        q_at = q + b * q_batch + s_at * q_row
        queries = tl.load(
            q_at + heads[:, None] * q_head + d[None, :],
            mask=head_in[:, None] & d_in[None, :],
            other=0.0,
        )
        w = tl.load(weights + b * w_batch + s_at * w_row + heads * w_head, mask=head_in, other=0.0)
        w = w.to(tl.float32)
        sum_q = tl.zeros([D_PAD, H_PAD], tl.float32)
        sum_w = tl.zeros([H_PAD], tl.float32)
        for first in range(0, topk, KEYS):
            place = row * topk + first + lane
            at = tl.load(indices + place, mask=first + lane < topk, other=-1)
            here = at >= 0
            g = tl.exp(tl.load(scores + place, mask=here, other=float("-inf")) - lse)
            g -= tl.load(target + place, mask=here, other=0.0) / whole
            keys = tl.load(
                k + b * k_batch + at.to(tl.int64)[:, None] * k_row + d[None, :],
                mask=here[:, None] & d_in[None, :],
                other=0.0,
            )
            s = tl.dot(keys, tl.trans(queries), input_precision="ieee")
            spread = tl.zeros_like(s) + tl.where(here, g, 0.0)[:, None]
            if RELU:
                spread = tl.where(s > 0.0, spread, 0.0)
            sum_w += tl.sum(spread * s, axis=0)
            high = spread.to(keys.dtype)
            sum_q = tl.dot(tl.trans(keys), high, sum_q, input_precision="ieee")
            if SPLIT:
                low = (spread - high.to(tl.float32)).to(keys.dtype)
                sum_q = tl.dot(tl.trans(keys), low, sum_q, input_precision="ieee")
            if SCATTER:
                into = g_out + (b * g_rows + near) * g_width + at
                tl.store(into, (g * counts * GAIN).to(g_out.dtype.element_ty), mask=here)
            else:
                none = tl.zeros([KEYS, D_PAD], tl.float32)
                sum_k = product(spread * w[None, :], queries, none, SPLIT) * by
                tl.atomic_add(
                    dk + (b * sk + at)[:, None] * D + d[None, :],
                    sum_k,
                    mask=here[:, None] & d_in[None, :],
                    sem="relaxed",
                )
        out = (s_at * batch + b) * HEADS + heads
        tl.store(dw + out, sum_w * by, mask=head_in)
        tl.store(
            dq + out[None, :] * D + d[:, None],
            (sum_q * (w * by)[None, :]).to(dq.dtype.element_ty),
            mask=head_in[None, :] & d_in[:, None],
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
            TOPK_PAD=topk_pad, KEYS=min(topk_pad, keys), RELU=index.use_relu, EPS=EPSILON,
            INSIDE_LOGS=self.inside_logs, ROWS=self.rows is not None, GRADIENTS=out is not None,
            SPLIT=q.dtype != torch.float32, SCATTER=g is not None, GAIN=index.gain,
            num_warps=warps, num_stages=2,
        )  # fmt: skip
