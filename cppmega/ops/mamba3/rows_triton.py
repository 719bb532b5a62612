"""Gradients of Mamba-3's keys and queries, and of their angles, from the states between chunks.

The kernel is launched twice, as the same computation with the two sides exchanged: for queries and
the gradient of the output, and for keys and values. A program handles a chunk of a group, and in it
the group's heads one after another, so that the gradients of queries or keys, which these heads
share, are summed in registers. What is summed over chunks, or has terms from both sides, is stored
apart and added later, in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mamba3.tiles_triton import (
    PI,
    at_rows,
    begins,
    between,
    biased,
    decays,
    factors,
    pairs,
    plain_columns,
    plain_rows,
    put_sum,
    rates,
    shares,
    state_tile,
    turned,
    turned_rows,
    weighed,
)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def rows_kernel(  # type: ignore[no-untyped-def]
    queries, keys, log_a, dt, trap, angles, theta, starts, x, z, given, query_bias, key_bias,
    rank_x, rank_z, rank_out, states, d_rows, d_dt, d_angles, d_theta, sums, length, chunks,
    angles_b, angles_l, x_b, x_l, z_b, z_l, KEYS: tl.constexpr, PACKED: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    chunk, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kind = x.dtype.element_ty
    HEADS: tl.constexpr = H // G
    N: tl.constexpr = 4 * K
    group = b * length * (R * G * N) + g * N
    first = chunk * T
    t = first + tl.arange(0, T)
    here = t < length
    begin, last = begins(starts, first, length, PACKED, T)
    rate = rates(angles + b * angles_b, angles_l, first, length, K, T)
    # For each token, the column's, itself and the later ones of its document and chunk.
    after = ((t[:, None] >= t[None, :]) & (begin[:, None] <= t[None, :])).to(tl.float32)
    all_one, all_other = tl.zeros((K, R, T), tl.float32), tl.zeros((K, R, T), tl.float32)
    all_plain = tl.zeros((2 * K, R * T), tl.float32)
    turning = tl.zeros((K, T), tl.float32)
    k_of_pair = tl.arange(0, K)
    for head in tl.range(HEADS, disable_licm=True):
        h = g * HEADS + head
        of_head, of_chunk = (b * H + h) * length, (b * chunks + chunk) * H + h
        step, at_once, later = shares(dt, trap, of_head, first, length, T)
        since, into, out_of, _ = decays(log_a, of_head, first, length, begin, last, T)
        cos, sin = turned(rate, step, theta + of_chunk * K, K)
        of_q, of_k = query_bias + h * (R * N), key_bias + h * (R * N)
        v, dy = factors(
            x + b * x_b + h * P, z + b * z_b + h * P, given + (b * length * H + h) * P,
            rank_x + h * (R * P), rank_z + h * (R * P), rank_out + h * (R * P), first, length,
            x_l, z_l, H * P, R, P, T,
        )  # fmt: skip
        weight, _, _ = between(since, begin, first, at_once, later, T)
        d_scores = weighed(tl.dot(tl.trans(v), dy), weight, R, T).to(kind)  # a row for each key
        if KEYS:
            own, of_own, mine, share = keys + group, of_k, v, out_of * later
            other, of_other, others = queries + group, of_q, tl.trans(d_scores)
        else:
            own, of_own, mine, share = queries + group, of_q, dy, into
            other, of_other, others = keys + group, of_k, d_scores
        of_state = of_chunk * (P * N) + state_tile(P, K)
        state, state_plain = tl.load(states + of_state), tl.load(states + of_state + P * 2 * K)
        share = at_rows(share, R, T)[None, :]
        summed = sums + of_chunk * (R * N)
        tile = plain_rows(other, of_other, first, length, G, R, K, T)
        found = tl.dot(tl.trans(tile), others, tl.dot(tl.trans(state_plain), mine) * share)
        put_sum(summed, tl.reshape(found, (2 * K, R, T)), plain_columns(K), R)
        all_plain += found
        tile = turned_rows(other, of_other, cos, sin, first, length, G, R, K, T)
        found = tl.dot(tl.trans(tile), others, tl.dot(tl.trans(state), mine) * share)
        d_one, d_other = pairs(found, R, K, T)
        c, s = tl.trans(cos)[:, None, :], tl.trans(sin)[:, None, :]
        d_one, d_other = d_one * c + d_other * s, d_other * c - d_one * s
        put_sum(summed, d_one, k_of_pair, R)
        put_sum(summed, d_other, k_of_pair + 2 * K, R)
        all_one += d_one
        all_other += d_other
        # The angle's gradient is the same before the rotation as after it.
        raw_one = biased(own, of_own, k_of_pair, first, length, G, R, K, T)
        raw_other = biased(own, of_own, k_of_pair + 2 * K, first, length, G, R, K, T)
        of_angle = tl.permute(raw_one, (2, 0, 1)) * d_other
        of_angle = tl.sum(of_angle - tl.permute(raw_other, (2, 0, 1)) * d_one, 1)
        from_here = tl.dot(of_angle, after, input_precision="ieee")
        tl.store(d_dt + of_head + t, tl.sum(from_here * tl.trans(rate), 0) * PI, mask=here)
        turning += from_here * step[None, :]
        earlier = tl.sum(tl.where((begin < first)[None, :], of_angle, 0.0), 1)
        tl.store(d_theta + of_chunk * K + k_of_pair, earlier)
    place = d_rows + group + tl.cast(first, tl.int64) * (R * G * N)
    place += tl.arange(0, T)[None, None, :] * (R * G * N)
    place += tl.arange(0, R)[None, :, None] * (G * N)
    j = k_of_pair[:, None, None]
    tl.store(place + j, all_one.to(kind), mask=here[None, None, :])
    tl.store(place + 2 * K + j, all_other.to(kind), mask=here[None, None, :])
    j = plain_columns(K)[:, None, None]
    found = tl.reshape(all_plain, (2 * K, R, T))
    tl.store(place + j, found.to(kind), mask=here[None, None, :])
    place = d_angles + ((b * G + g) * length + first) * K
    place += k_of_pair[:, None] + tl.arange(0, T)[None, :] * K
    tl.store(place, turning, mask=here[None, :])
