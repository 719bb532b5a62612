"""The backward of M2RNN's recurrence: the chunks of a document from the last to the first.

A program recomputes the states of a chunk, from the state that the forward saved before it, into
its own memory, and then iterates backwards through the chunk. The programs of a head divide the
documents: program n of `programs` processes documents n, n + programs, and so on, so that this
memory is bounded for any number of documents.

There are no atomics. Each head writes its contribution to the gradients of q and k, which all heads
share, and each program its contribution to a transition's gradient; both are summed afterwards, in
a fixed order.

`cppmega.ops.m2rnn_reference` is the reference implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops import m2rnn_forward_triton as forwards
from cppmega.ops.m2rnn_forward_triton import candidate, extent, tile

PROGRAMS = 16
"""Maximum number of programs per head."""


def programs(documents: int) -> int:
    """The number of programs per head."""
    return max(1, min(documents, PROGRAMS))


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, weight, decay, fresh, bounds, states, gradient, within, d_q, d_k, d_v, d_weight,
    d_log_decay, s, b, q_rows, k_rows, v_rows, heads, documents, programs,
    K: tl.constexpr, V: tl.constexpr, TILE_K: tl.constexpr, TILE_V: tl.constexpr,
    CHUNK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % heads
    i, j = tl.arange(0, TILE_K), tl.arange(0, TILE_V)
    has_i, has_j = i < K, j < V
    at_w, has_w = (head * V + j[:, None]) * V + j[None, :], has_j[:, None] & has_j[None, :]
    w = tl.load(weight + at_w, mask=has_w, other=0.0).to(tl.float32)
    at_h, has_h = i[:, None] * V + j[None, :], has_i[:, None] & has_j[None, :]
    within += tl.cast(tl.program_id(0), tl.int64) * (CHUNK * K * V)
    d_w = tl.zeros((TILE_V, TILE_V), tl.float32)
    for document in range(tl.program_id(0) // heads, documents, programs):
        sequence, first, end = extent(bounds, document, s, PACKED)
        d_h = tl.zeros((TILE_K, TILE_V), tl.float32)
        chunks = (end - first + CHUNK - 1) // CHUNK
        for back in range(0, chunks):
            begin = first + (chunks - 1 - back) * CHUNK
            stop = tl.minimum(begin + CHUNK, end)
            chunk = tl.cast(sequence, tl.int64) * ((s + CHUNK - 1) // CHUNK) + begin // CHUNK
            saved = states + (chunk * heads + head) * (K * V) + at_h
            h = tl.load(saved, mask=has_h & (begin > first), other=0.0)
            for t in range(begin, stop):
                tl.store(within + (t - begin) * (K * V) + at_h, h, mask=has_h)
                row = tl.cast(t, tl.int64) * b + sequence
                at_v = row * v_rows + head * V + j
                k_t = tl.load(k + row * k_rows + i, mask=has_i, other=0.0).to(tl.float32)
                v_t = tl.load(v + at_v, mask=has_j, other=0.0).to(tl.float32)
                f, u = tl.load(decay + row * heads + head), tl.load(fresh + row * heads + head)
                h = f * h + u * candidate(h, w, k_t, v_t)
            tl.debug_barrier()  # other threads may read what a thread has written
            for again in range(begin, stop):
                t = begin + stop - 1 - again
                row = tl.cast(t, tl.int64) * b + sequence
                at_v = row * v_rows + head * V + j
                at_y = (row * heads + head) * V + j
                at_k = (row * heads + head) * K + i
                h = tl.load(within + (t - begin) * (K * V) + at_h, mask=has_h, other=0.0)
                q_t = tl.load(q + row * q_rows + i, mask=has_i, other=0.0).to(tl.float32)
                k_t = tl.load(k + row * k_rows + i, mask=has_i, other=0.0).to(tl.float32)
                v_t = tl.load(v + at_v, mask=has_j, other=0.0).to(tl.float32)
                d_y = tl.load(gradient + at_y, mask=has_j, other=0.0).to(tl.float32)
                f, u = tl.load(decay + row * heads + head), tl.load(fresh + row * heads + head)
                z = candidate(h, w, k_t, v_t)
                of_q = tl.sum((f * h + u * z) * d_y[None, :], 1)
                tl.store(d_q + at_k, of_q, mask=has_i)
                d_h += q_t[:, None] * d_y[None, :]
                of_decay = tl.sum(d_h * (h - z))
                tl.store(d_log_decay + row * heads + head, f * of_decay)
                d_x = u * d_h * (1.0 - z * z)
                tl.store(d_k + at_k, tl.sum(d_x * v_t[None, :], 1), mask=has_i)
                of_v = tl.sum(d_x * k_t[:, None], 0)
                tl.store(d_v + at_y, of_v.to(d_v.dtype.element_ty), mask=has_j)
                d_w += tl.dot(tl.trans(h), d_x, input_precision="ieee")
                d_h = f * d_h + tl.dot(d_x, tl.trans(w), input_precision="ieee")
            tl.debug_barrier()  # the next chunk overwrites this one
    d_weight += (tl.program_id(0) // heads) * (heads * V * V)
    tl.store(d_weight + at_w, d_w, mask=has_w)


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
) -> None:
    """Write the gradients; inputs are those of `forward`, and everything else is contiguous.

    Args:
        within: fp32 `[programs, heads, CHUNK, K, V]`, the states of a chunk.
        d_q: fp32 `[s, b, heads, K]`, the contribution of each head.
        d_k: as `d_q`.
        d_v: `[s, b, heads, V]`.
        d_weight: fp32 `[programs, heads, V, V]`, the contribution of each program.
        d_log_decay: fp32 `[s, b, heads]`.
    """
    s, b, heads, width = v.shape
    documents = b if bounds is None else len(bounds) - 1
    _backward_kernel[(len(d_weight) * heads,)](
        q, k, v, weight, decay, fresh, q if bounds is None else bounds, states, gradient, within,
        d_q, d_k, d_v, d_weight, d_log_decay, s, b, q.stride(1), k.stride(1), v.stride(1), heads,
        documents, len(d_weight), K=k.size(-1), V=width, TILE_K=tile(k.size(-1)),
        TILE_V=tile(width), CHUNK=forwards.CHUNK, PACKED=bounds is not None,
        num_warps=forwards.WARPS, num_stages=1,  # more need more shared memory than sm_120 has
    )  # fmt: skip
