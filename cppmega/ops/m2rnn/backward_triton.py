"""The backward of M2RNN's recurrence: the chunks of a document from the last to the first.

Grid: programs (at most `PROGRAMS`) x heads x parts of the K rows. As in the forward, a program of
one warp holds some rows of a head's state, and here of its gradient dh, and the transition's
gradient dw `[V, V]`. It recomputes the states of a chunk, from the state that the forward saved
before it, into its own memory, and then iterates backwards through the chunk, with loads one step
ahead. Program n of `programs` processes documents n, n + programs, and so on, so that this memory
is bounded for any number of documents. k, v and the decay are read twice, q and dO once, and
gradients are written once.

Latency limits it, as in the forward: each step is computed twice, one after the other
(`benchmarks/results/m2rnn_designs.md`).

There are no atomics. Each head writes its contribution to the gradients of q and k, which all heads
share, each program its contribution to a transition's gradient, and the programs of some rows
theirs to those of v and of the decay, which are sums over rows; all are summed afterwards, in a
fixed order.

The gradient of a state is clipped as soon as it is complete, so that in later products it is never
larger.

With 16-bit inputs, states and their gradients are multiplied as the sums of two tensors of the
transition's type each.

`cppmega.ops.m2rnn.naive` is the reference implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.rows import row_stride
from cppmega.ops.common.tiles_triton import padded
from cppmega.ops.m2rnn import forward_triton
from cppmega.ops.m2rnn.forward_triton import (
    candidate,
    extent,
    halves,
    is_narrow,
    load,
    tile_rows,
    weights,
)

PROGRAMS = 16
"""Maximum number of programs per head and part of its rows."""


def programs(documents: int) -> int:
    """The number of programs per head and part of its rows."""
    return max(1, min(documents, PROGRAMS))


@triton.jit
def products(h, dx, w_t, dw, NARROW: tl.constexpr):
    """A product's gradient with respect to the state, and `d_w` plus that for the transition."""
    if NARROW:
        h_high, h_low = halves(tl.trans(h), w_t)
        high, low = halves(dx, w_t)
        dw = tl.dot(h_high, high, tl.dot(h_low, high, tl.dot(h_high, low, dw)))
        return tl.dot(high, w_t, tl.dot(low, w_t)), dw
    else:
        # This step's product must be summed separately: adding each row to the sum over all steps
        # would round as many times. Triton turns `d + dot(...)` into a dot that accumulates onto d,
        # hence the two negations.
        dw -= tl.dot(-tl.trans(h), dx, input_precision="ieee")
        return tl.dot(dx, w_t, input_precision="ieee"), dw


@on_its_device
@triton.jit
def _backward_kernel(
    q, k, v, weight, decay, fresh, bounds, states, do, within, dq, dk, dv, d_weight,
    d_log_decay, s, b, q_rows, k_rows, v_rows, heads, documents, programs, parts,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, TILE_V: tl.constexpr,
    CHUNK: tl.constexpr, PACKED: tl.constexpr, NARROW: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = K % ROWS == 0 and V == TILE_V
    part, pid = tl.program_id(0) % parts, tl.program_id(0) // parts
    head = pid % heads
    r, j = tl.arange(0, ROWS), tl.arange(0, TILE_V)
    i = part * ROWS + r
    has_i, has_j = i < K, j < V
    at_w, has_w = (head * V + j[:, None]) * V + j[None, :], has_j[:, None] & has_j[None, :]
    w = weights(weight, at_w, has_w, NARROW)
    at_turned = (head * V + j[None, :]) * V + j[:, None]
    w_t = tl.load(weight + at_turned, mask=has_w, other=0.0)
    if not NARROW:
        w_t = w_t.to(tl.float32)
    at_h, has_h = i[:, None] * V + j[None, :], has_i[:, None] & has_j[None, :]
    within += tl.cast(tl.program_id(0), tl.int64) * (CHUNK * ROWS * TILE_V)
    at_tile = r[:, None] * TILE_V + j[None, :]
    dv += tl.cast(part, tl.int64) * s * b * heads * V
    d_log_decay += tl.cast(part, tl.int64) * s * b * heads
    dw = tl.zeros((TILE_V, TILE_V), tl.float32)
    for document in range(pid // heads, documents, programs):
        sequence, first, end = extent(bounds, document, s, PACKED)
        dh = tl.zeros((ROWS, TILE_V), tl.float32)
        chunks = (end - first + CHUNK - 1) // CHUNK
        for n in range(0, chunks):
            begin = first + (chunks - 1 - n) * CHUNK
            stop = tl.minimum(begin + CHUNK, end)
            chunk = tl.cast(sequence, tl.int64) * ((s + CHUNK - 1) // CHUNK) + begin // CHUNK
            saved = states + (chunk * heads + head) * (K * V) + at_h
            h = tl.load(saved, mask=has_h & (begin > first), other=0.0)
            row = tl.cast(begin, tl.int64) * b + sequence
            at_k, at_v = k + row * k_rows, v + row * v_rows + head * V
            at_f, at_u = decay + row * heads + head, fresh + row * heads + head
            k_t, v_t = load(at_k + i, has_i, WHOLE), load(at_v + j, has_j, WHOLE)
            f, u = tl.load(at_f), tl.load(at_u)
            kept = within
            for _ in range(begin, stop - 1):
                tl.store(kept + at_tile, h)
                kept += ROWS * TILE_V
                at_k += b * k_rows
                at_v += b * v_rows
                at_f += b * heads
                at_u += b * heads
                next_k, next_v = load(at_k + i, has_i, WHOLE), load(at_v + j, has_j, WHOLE)
                next_f, next_u = tl.load(at_f), tl.load(at_u)
                h = f * h + u * candidate(h, w, k_t, v_t, NARROW)
                k_t, v_t, f, u = next_k, next_v, next_f, next_u
            tl.debug_barrier()  # other threads may read what a thread has written
            row += tl.cast(stop - 1 - begin, tl.int64) * b
            at_q, at_do = q + row * q_rows, do + (row * heads + head) * V
            to_q, to_k = dq + (row * heads + head) * K, dk + (row * heads + head) * K
            to_v, to_f = dv + (row * heads + head) * V, d_log_decay + row * heads + head
            q_t, do_t = load(at_q + i, has_i, WHOLE), load(at_do + j, has_j, WHOLE)
            for left in range(begin, stop):
                step = tl.where(left + 1 < stop, b, 0)  # the first one is loaded again
                kept -= tl.where(left + 1 < stop, ROWS * TILE_V, 0)
                at_q -= step * q_rows
                at_k -= step * k_rows
                at_v -= step * v_rows
                at_do -= step * heads * V
                at_f -= step * heads
                at_u -= step * heads
                h_prev = tl.load(kept + at_tile)
                next_q, next_k = load(at_q + i, has_i, WHOLE), load(at_k + i, has_i, WHOLE)
                next_v, next_do = load(at_v + j, has_j, WHOLE), load(at_do + j, has_j, WHOLE)
                next_f, next_u = tl.load(at_f), tl.load(at_u)

                c = candidate(h, w, k_t, v_t, NARROW)
                do_wide = do_t.to(tl.float32)[None, :]
                tl.store(to_q + i, tl.sum((f * h + u * c) * do_wide, 1), mask=has_i)
                dh += q_t.to(tl.float32)[:, None] * do_wide
                if CLIP is not None:  # NaN remains NaN, as in torch
                    dh = tl.clamp(dh, -CLIP, CLIP, propagate_nan=tl.PropagateNan.ALL)
                tl.store(to_f, f * tl.sum(dh * (h - c)))
                dx = u * dh * (1.0 - c * c)
                tl.store(to_k + i, tl.sum(dx * v_t.to(tl.float32)[None, :], 1), mask=has_i)
                dv_t = tl.sum(dx * k_t.to(tl.float32)[:, None], 0)
                tl.store(to_v + j, dv_t.to(dv.dtype.element_ty), mask=has_j)
                dh_prev, dw = products(h, dx, w_t, dw, NARROW)
                dh = f * dh + dh_prev

                to_q -= b * heads * K
                to_k -= b * heads * K
                to_v -= b * heads * V
                to_f -= b * heads
                h, q_t, k_t, v_t, do_t = h_prev, next_q, next_k, next_v, next_do
                f, u = next_f, next_u
            tl.debug_barrier()  # the next chunk overwrites this one
    d_weight += tl.cast(pid // heads * parts + part, tl.int64) * (heads * V * V)
    tl.store(d_weight + at_w, dw, mask=has_w)


@torch.library.custom_op(
    "cppmega::m2rnn_backward",
    mutates_args=("within", "d_q", "d_k", "d_v", "d_weight", "d_log_decay"),
)
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    decay: Tensor,
    fresh: Tensor,
    bounds: Tensor | None,
    states: Tensor,
    gradient: Tensor,
    within: Tensor,
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    d_weight: Tensor,
    d_log_decay: Tensor,
    gradient_clipping: float | None,
) -> None:
    """Write the gradients; inputs are those of `forward`, and everything else is contiguous.

    Args:
        within: fp32, as `memory_within` allocates it.
        d_q: fp32 `[s, b, heads, K]`, the contribution of each head.
        d_k: as `d_q`.
        d_v: `[parts, s, b, heads, V]`, the contribution of each part of the rows.
        d_weight: fp32 `[programs * parts, heads, V, V]`, the contribution of each program.
        d_log_decay: fp32 `[parts, s, b, heads]`.
        gradient_clipping: the largest element of a state's gradient; None: any.
    """
    s, b, heads, width = v.shape
    documents = b if bounds is None else len(bounds) - 1
    _backward_kernel[(len(d_weight) * heads,)](
        q, k, v, weight, decay, fresh, q if bounds is None else bounds, states, gradient, within,
        d_q, d_k, d_v, d_weight, d_log_decay, s, b, *map(row_stride, (q, k, v)), heads,
        documents, len(d_weight) // len(d_v), len(d_v), K=k.size(-1), V=width,
        ROWS=tile_rows(k.size(-1)), TILE_V=padded(width), CHUNK=forward_triton.CHUNK,
        PACKED=bounds is not None, NARROW=is_narrow(v, weight), CLIP=gradient_clipping,
        num_warps=forward_triton.WARPS,
        num_stages=1,  # more stages need more shared memory than sm_120 has
    )  # fmt: skip


def memory_within(count: int, heads: int, key_dim: int, width: int, device: torch.device) -> Tensor:
    """Memory for the states of a chunk, of each of `count` programs of a head, fp32."""
    size = (count, heads, forward_triton.CHUNK, tile_rows(key_dim), padded(width))
    return torch.empty(size, dtype=torch.float32, device=device)
