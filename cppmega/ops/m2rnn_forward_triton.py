"""The forward of M2RNN's recurrence: one program per document and head, its state in registers.

A program keeps its state in fp32 and multiplies it in fp32. The states before every `CHUNK`-th step
of a document, except the first, are saved for the backward, which recomputes the states in between;
nothing else is saved.

`cppmega.ops.m2rnn_reference` is the reference implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
"""Steps from one saved state to the next."""

WARPS = 4


def tile(size: int) -> int:
    """A size padded for registers; a product needs at least 16."""
    return max(16, int(triton.next_power_of_2(size)))


def saved_states(v: Tensor, key_dim: int) -> Tensor:
    """Allocate the states from which the backward starts, fp32 `[b, s / CHUNK, heads, K, V]`.

    The state before step `t` of a sequence is at index `t // CHUNK`. Documents do not collide: the
    states of one are `CHUNK` steps apart, and the first of the next is as far from its beginning.
    """
    s, b, heads, width = v.shape
    size = (b, triton.cdiv(s, CHUNK), heads, key_dim, width)
    return torch.empty(size, dtype=torch.float32, device=v.device)


@triton.jit  # type: ignore[untyped-decorator]
def tanh(x):  # type: ignore[no-untyped-def]
    """tanh in fp32, by its series near 0, where the quotient would cancel."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    xx = x * x
    series = -1382.0 / 155925.0 + xx * (21844.0 / 6081075.0)
    series = -17.0 / 315.0 + xx * (62.0 / 2835.0 + xx * series)
    series = x * (1.0 + xx * (-1.0 / 3.0 + xx * (2.0 / 15.0 + xx * series)))
    return tl.where(tl.abs(x) < 0.4, series, tl.where(x < 0, -far, far))


@triton.jit  # type: ignore[untyped-decorator]
def candidate(h, weight, k, v):  # type: ignore[no-untyped-def]
    """The candidate that a step mixes into its state."""
    return tanh(tl.dot(h, weight, input_precision="ieee") + k[:, None] * v[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def extent(bounds, document, s, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sequence that contains a document, its first step there, and the step after its last."""
    if PACKED:
        return 0, tl.load(bounds + document), tl.load(bounds + document + 1)
    else:
        return document, 0, s


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, weight, decay, fresh, bounds, states, out, s, b, q_rows, k_rows, v_rows, heads,
    K: tl.constexpr, V: tl.constexpr, TILE_K: tl.constexpr, TILE_V: tl.constexpr,
    CHUNK: tl.constexpr, PACKED: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % heads
    sequence, first, end = extent(bounds, tl.program_id(0) // heads, s, PACKED)
    i, j = tl.arange(0, TILE_K), tl.arange(0, TILE_V)
    has_i, has_j = i < K, j < V
    at_w = (head * V + j[:, None]) * V + j[None, :]
    w = tl.load(weight + at_w, mask=has_j[:, None] & has_j[None, :], other=0.0).to(tl.float32)
    at_h, has_h = i[:, None] * V + j[None, :], has_i[:, None] & has_j[None, :]
    h = tl.zeros((TILE_K, TILE_V), tl.float32)
    for t in range(first, end):
        row = tl.cast(t, tl.int64) * b + sequence
        if SAVE:  # noqa: SIM102
            if (t > first) & ((t - first) % CHUNK == 0):
                chunk = tl.cast(sequence, tl.int64) * ((s + CHUNK - 1) // CHUNK) + t // CHUNK
                tl.store(states + (chunk * heads + head) * (K * V) + at_h, h, mask=has_h)
        q_t = tl.load(q + row * q_rows + i, mask=has_i, other=0.0).to(tl.float32)
        k_t = tl.load(k + row * k_rows + i, mask=has_i, other=0.0).to(tl.float32)
        v_t = tl.load(v + row * v_rows + head * V + j, mask=has_j, other=0.0).to(tl.float32)
        f, u = tl.load(decay + row * heads + head), tl.load(fresh + row * heads + head)
        h = f * h + u * candidate(h, w, k_t, v_t)
        y = tl.sum(q_t[:, None] * h, 0).to(out.dtype.element_ty)
        tl.store(out + (row * heads + head) * V + j, y, mask=has_j)


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
    which is one minus decay, are fp32; bounds are int32.
    """
    s, b, heads, width = v.shape
    documents = b if bounds is None else len(bounds) - 1
    if v.numel() and documents:
        _forward_kernel[(documents * heads,)](
            q, k, v, weight, decay, fresh, q if bounds is None else bounds,
            out if states is None else states, out, s, b, q.stride(1), k.stride(1), v.stride(1),
            heads, K=k.size(-1), V=width, TILE_K=tile(k.size(-1)), TILE_V=tile(width), CHUNK=CHUNK,
            PACKED=bounds is not None, SAVE=states is not None, num_warps=WARPS,
        )  # fmt: skip
