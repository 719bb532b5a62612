"""The forward of M2RNN's recurrence: the state stays in registers, some of its rows per program.

Grid: documents x heads x parts of the K rows. A program of one warp holds `ROWS` rows of a head's
state, `[ROWS, V]` in fp32, and the transition `[V, V]`. A row of a state depends only on the same
row of the state before, so that programs never wait for one another; only the output sums over
rows, and each program writes its contribution. q, k, v and the decay are loaded one step ahead;
each is read once per part (q and k, which all heads share, once per head).

Latency limits it: a step is a chain of a product on tensor cores, tanh and shuffles that takes
about 1,900 cycles of one warp on an H200, with 0.07 TB/s of memory traffic
(`benchmarks/results/m2rnn_designs.md`).

States are kept in fp32. With 16-bit inputs, a state is multiplied by the transition as the sum of
two fp16 tensors, which hold 22 bits of it, since a state is never larger than 1; with fp32 inputs
everything is multiplied in fp32. The states before every `CHUNK`-th step of a document, except the
first, are saved for the backward, which recomputes the states in between; nothing else is saved.

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

CHUNK = 64
"""Steps from one saved state to the next."""

ROWS = 32
"""Rows of a state per program."""

WARPS = 1


def tile_rows(key_dim: int) -> int:
    """Rows of a state per program, for states of `key_dim` rows."""
    return min(ROWS, padded(key_dim))


def parts(key_dim: int) -> int:
    """The number of programs among which the rows of a state are divided."""
    return int(triton.cdiv(key_dim, tile_rows(key_dim)))


def saved_states(v: Tensor, key_dim: int) -> Tensor:
    """Allocate the states from which the backward starts, fp32 `[b, s / CHUNK, heads, K, V]`.

    The state before step `t` of a sequence is at index `t // CHUNK`. Documents do not collide: the
    states of one are `CHUNK` steps apart, and the first of the next is as far from its beginning.
    """
    s, b, heads, width = v.shape
    size = (b, triton.cdiv(s, CHUNK), heads, key_dim, width)
    return torch.empty(size, dtype=torch.float32, device=v.device)


def is_narrow(v: Tensor, weight: Tensor) -> bool:
    """Whether products are those of 16-bit tensors."""
    return v.dtype.itemsize == 2 and weight.dtype.itemsize == 2


@triton.jit
def tanh(x, NARROW: tl.constexpr):
    """tanh in fp32; near 0, where the difference would cancel, by a series or a fraction."""
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))  # 2 / ln 2
    xx = x * x
    if NARROW:  # one instruction where a quotient takes eight, and a series to 20 bits
        root = tl.rsqrt(1.0 + e)
        far = (1.0 - e) * (root * root)
        near, until = x - x * xx * (1.0 / 3.0), 0.04
    else:  # a GPU's exponential has 22 bits, which 1 - e keeps only from 1 on
        far = tl.div_rn(1.0 - e, 1.0 + e)
        over = 135135.0 + xx * (17325.0 + xx * (378.0 + xx))
        under = 135135.0 + xx * (62370.0 + xx * (3150.0 + xx * 28.0))
        near, until = x * tl.div_rn(over, under), 1.0
    return tl.where(tl.abs(x) < until, near, tl.where(x < 0, -far, far))


@triton.jit
def load(ptr, mask, WHOLE: tl.constexpr):
    """Load a tile, which is within its tensor if all tiles are WHOLE."""
    return tl.load(ptr) if WHOLE else tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def weights(weight, offs, mask, NARROW: tl.constexpr):
    """A transition as `candidate` multiplies by it."""
    w = tl.load(weight + offs, mask=mask, other=0.0)
    return w.to(tl.float16) if NARROW else w.to(tl.float32)


@triton.jit
def halves(x, like):
    """A tensor in fp32 as the sum of two of a 16-bit type."""
    high = x.to(like.dtype)
    return high, (x - high.to(tl.float32)).to(like.dtype)


@triton.jit
def candidate(h, weight, k, v, NARROW: tl.constexpr):
    """The candidate that a step mixes into its state."""
    if NARROW:
        high, low = halves(h, weight)
        moved = tl.dot(high, weight, tl.dot(low, weight))
    else:
        moved = tl.dot(h, weight, input_precision="ieee")
    return tanh(moved + k.to(tl.float32)[:, None] * v.to(tl.float32)[None, :], NARROW)


@triton.jit
def extent(bounds, document, s, PACKED: tl.constexpr):
    """The sequence that contains a document, its first step there, and the step after its last."""
    if PACKED:
        return 0, tl.load(bounds + document), tl.load(bounds + document + 1)
    else:
        return document, 0, s


@on_its_device
@triton.jit
def _forward_kernel(
    q, k, v, weight, decay, fresh, bounds, states, out, s, b, q_rows, k_rows, v_rows, heads, parts,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, TILE_V: tl.constexpr,
    CHUNK: tl.constexpr, PACKED: tl.constexpr, SAVE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = K % ROWS == 0 and V == TILE_V
    part, pid = tl.program_id(0) % parts, tl.program_id(0) // parts
    head = pid % heads
    sequence, first, end = extent(bounds, pid // heads, s, PACKED)
    if first < end:
        i, j = part * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE_V)
        has_i, has_j = i < K, j < V
        at_w, has_w = (head * V + j[:, None]) * V + j[None, :], has_j[:, None] & has_j[None, :]
        w = weights(weight, at_w, has_w, NARROW)
        at_h, has_h = i[:, None] * V + j[None, :], has_i[:, None] & has_j[None, :]
        row = tl.cast(first, tl.int64) * b + sequence
        at_q, at_k = q + row * q_rows, k + row * k_rows
        at_v = v + row * v_rows + head * V
        at_f, at_u = decay + row * heads + head, fresh + row * heads + head
        to_y = out + ((tl.cast(part, tl.int64) * s * b + row) * heads + head) * V
        h = tl.zeros((ROWS, TILE_V), tl.float32)
        q_t, k_t = load(at_q + i, has_i, WHOLE), load(at_k + i, has_i, WHOLE)
        v_t = load(at_v + j, has_j, WHOLE)
        f, u = tl.load(at_f), tl.load(at_u)
        for t in range(first, end):
            if SAVE:  # noqa: SIM102
                if (t > first) & ((t - first) % CHUNK == 0):
                    chunk = tl.cast(sequence, tl.int64) * ((s + CHUNK - 1) // CHUNK) + t // CHUNK
                    tl.store(states + (chunk * heads + head) * (K * V) + at_h, h, mask=has_h)
            step = tl.where(t + 1 < end, b, 0)  # the last one is loaded again
            at_q += step * q_rows
            at_k += step * k_rows
            at_v += step * v_rows
            at_f += step * heads
            at_u += step * heads
            next_q, next_k = load(at_q + i, has_i, WHOLE), load(at_k + i, has_i, WHOLE)
            next_v = load(at_v + j, has_j, WHOLE)
            next_f, next_u = tl.load(at_f), tl.load(at_u)
            h = f * h + u * candidate(h, w, k_t, v_t, NARROW)
            y = tl.sum(q_t.to(tl.float32)[:, None] * h, 0)
            tl.store(to_y + j, y.to(out.dtype.element_ty), mask=has_j)
            to_y += b * heads * V
            q_t, k_t, v_t, f, u = next_q, next_k, next_v, next_f, next_u


@torch.library.custom_op("cppmega::m2rnn_forward", mutates_args=("states", "out"))
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    decay: Tensor,
    fresh: Tensor,
    bounds: Tensor | None,
    states: Tensor | None,
    out: Tensor,
) -> None:
    """Write the outputs into `out`, and the states into those of `saved_states` unless None.

    The rows of q, k and v have constant strides; everything else is contiguous. Decay and fresh,
    which is one minus decay, are fp32; bounds are int32; `out` is `[parts, s, b, heads, V]`, of
    which the sum over parts is the output.
    """
    s, b, heads, width = v.shape
    documents = b if bounds is None else len(bounds) - 1
    if out.numel() and documents:
        _forward_kernel[(documents * heads * len(out),)](
            q, k, v, weight, decay, fresh, q if bounds is None else bounds,
            out if states is None else states, out, s, b, *map(row_stride, (q, k, v)),
            heads, len(out), K=k.size(-1), V=width, ROWS=tile_rows(k.size(-1)),
            TILE_V=padded(width), CHUNK=CHUNK, PACKED=bounds is not None, SAVE=states is not None,
            NARROW=is_narrow(v, weight), num_warps=WARPS,
        )  # fmt: skip
