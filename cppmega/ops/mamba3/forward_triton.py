"""Mamba-3's scan with the skip connection, the gate and the sum over ranks.

Grid: heads x sequences. A program holds the state `[P, 4 K]` in fp32 registers, as a rotated and a
plain tile, and walks along the chunks; a chunk of R * T rows is a causal attention with decays,
plus the product of queries and state. x and z are read once, queries and keys once per head of
their group (they are rotated here), and only the output is written.

The chain of chunks limits it: each needs seven products of 16-bit tiles while the loads of the next
one or two are in flight, and other parallelism comes from heads and sequences alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mamba3.tiles_triton import (
    at_rows,
    begins,
    between,
    by_column,
    columns_of,
    decays,
    gated,
    plain_rows,
    put_values,
    rates,
    shares,
    turned,
    turned_rows,
    weighed,
)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def forward_kernel(  # type: ignore[no-untyped-def]
    queries, keys, log_a, dt, trap, angles, theta, starts, x, z, query_bias, key_bias, skip,
    rank_x, rank_z, rank_out, out, length, chunks, angles_b, angles_l, x_b, x_l, z_b, z_l,
    PACKED: tl.constexpr, H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kind = x.dtype.element_ty
    group = b * length * (R * G * 4 * K) + (h // (H // G)) * (4 * K)
    offs_head = (b * H + h) * length
    weight_x, weight_z, weight_out = (
        by_column(rank_x + h * (R * P), R, P),
        by_column(rank_z + h * (R * P), R, P),
        by_column(rank_out + h * (R * P), R, P),
    )
    q_bias, k_bias = query_bias + h * (R * 4 * K), key_bias + h * (R * 4 * K)
    d_skip = tl.load(skip + h)
    state, state_plain = tl.zeros((P, 2 * K), tl.float32), tl.zeros((P, 2 * K), tl.float32)
    for chunk in tl.range(chunks, disable_licm=True):
        first = chunk * T
        step, at_once, later = shares(dt, trap, offs_head, first, length, T)
        begin, last = begins(starts, first, length, PACKED, T)
        since, into, out_of, across = decays(log_a, offs_head, first, length, begin, last, T)
        rate = rates(angles + b * angles_b, angles_l, first, length, K, T)
        cos, sin = turned(rate, step, theta + ((b * chunks + chunk) * H + h) * K, K)
        q = turned_rows(queries + group, q_bias, cos, sin, first, length, G, R, K, T)
        k = turned_rows(keys + group, k_bias, cos, sin, first, length, G, R, K, T)
        q_plain = plain_rows(queries + group, q_bias, first, length, G, R, K, T)
        k_plain = plain_rows(keys + group, k_bias, first, length, G, R, K, T)
        v = columns_of(x + b * x_b + h * P, first, length, x_l, P, T) * weight_x
        v = tl.reshape(v, (P, R * T))
        weight, _, _ = between(since, begin, first, at_once, later, T)
        # With a row for each key, so that the output has a column for each query.
        scores = tl.dot(k_plain, tl.trans(q_plain), tl.dot(k, tl.trans(q)))
        y = tl.dot(state_plain.to(kind), tl.trans(q_plain), tl.dot(state.to(kind), tl.trans(q)))
        y = y * at_rows(into, R, T)[None, :] + d_skip * v
        y = tl.dot(v.to(kind), weighed(scores, weight, R, T).to(kind), y)
        gate, _ = gated(columns_of(z + b * z_b + h * P, first, length, z_l, P, T), weight_z)
        y = tl.sum(tl.reshape(y, (P, R, T)) * gate * weight_out, 1)
        put_values(out + (b * length * H + h) * P, y, first, length, H * P, P, T)
        v_decayed = (v * at_rows(out_of * later, R, T)[None, :]).to(kind)
        state = tl.dot(v_decayed, k, state * across)
        state_plain = tl.dot(v_decayed, k_plain, state_plain * across)
