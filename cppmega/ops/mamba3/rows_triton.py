"""The gradients of Mamba-3's queries and keys, and of their angles, all chunks in parallel.

Grid: chunks x groups x sequences, launched once for queries (from dO and the states before each
chunk) and once for keys (from values and the states' gradients after it). A program loops over its
group's heads, since they share queries and keys: it accumulates dQ or dK `[4 K, R * T]` and the
gradient of the angles `[K, T]` in registers, and writes each once. Per head it reads x, z, dO and
both tiles of the state once, and stores the sums for biases, dt and the angles before the chunk;
sums over chunks, and terms from both launches, are added later, in a fixed order.

Latency limits it (`benchmarks/results/mamba3_scan_designs.md`): it uses 35 % of the issue slots;
warps wait for shared memory (26 to 28 % of their time) and for global memory (22 to 27 %).
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
    queries, keys, log_a, dt, trap, angles, theta, starts, x, z, do, query_bias, key_bias,
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
    mask = t < length
    begin, last = begins(starts, first, length, PACKED, T)
    rate = rates(angles + b * angles_b, angles_l, first, length, K, T)
    # For each token, the column's, itself and the later ones of its document and chunk.
    after = ((t[:, None] >= t[None, :]) & (begin[:, None] <= t[None, :])).to(tl.float32)
    acc_one, acc_other = tl.zeros((K, R, T), tl.float32), tl.zeros((K, R, T), tl.float32)
    acc_plain = tl.zeros((2 * K, R * T), tl.float32)
    d_turn = tl.zeros((K, T), tl.float32)
    k_of_pair = tl.arange(0, K)
    for head in tl.range(HEADS, disable_licm=True):
        h = g * HEADS + head
        offs_head, offs_chunk = (b * H + h) * length, (b * chunks + chunk) * H + h
        step, at_once, later = shares(dt, trap, offs_head, first, length, T)
        since, into, out_of, _ = decays(log_a, offs_head, first, length, begin, last, T)
        cos, sin = turned(rate, step, theta + offs_chunk * K, K)
        q_bias, k_bias = query_bias + h * (R * N), key_bias + h * (R * N)
        v, dy = factors(
            x + b * x_b + h * P, z + b * z_b + h * P, do + (b * length * H + h) * P,
            rank_x + h * (R * P), rank_z + h * (R * P), rank_out + h * (R * P), first, length,
            x_l, z_l, H * P, R, P, T,
        )  # fmt: skip
        weight, _, _ = between(since, begin, first, at_once, later, T)
        d_scores = weighed(tl.dot(tl.trans(v), dy), weight, R, T).to(kind)  # a row for each key
        if KEYS:
            own, own_bias, mine, share = keys + group, k_bias, v, out_of * later
            other, other_bias, others = queries + group, q_bias, tl.trans(d_scores)
        else:
            own, own_bias, mine, share = queries + group, q_bias, dy, into
            other, other_bias, others = keys + group, k_bias, d_scores
        offs_state = offs_chunk * (P * N) + state_tile(P, K)
        state, state_plain = tl.load(states + offs_state), tl.load(states + offs_state + P * 2 * K)
        share = at_rows(share, R, T)[None, :]
        p_sums = sums + offs_chunk * (R * N)
        tile = plain_rows(other, other_bias, first, length, G, R, K, T)
        d_tile = tl.dot(tl.trans(tile), others, tl.dot(tl.trans(state_plain), mine) * share)
        put_sum(p_sums, tl.reshape(d_tile, (2 * K, R, T)), plain_columns(K), R)
        acc_plain += d_tile
        tile = turned_rows(other, other_bias, cos, sin, first, length, G, R, K, T)
        d_tile = tl.dot(tl.trans(tile), others, tl.dot(tl.trans(state), mine) * share)
        d_one, d_other = pairs(d_tile, R, K, T)
        c, s = tl.trans(cos)[:, None, :], tl.trans(sin)[:, None, :]
        d_one, d_other = d_one * c + d_other * s, d_other * c - d_one * s
        put_sum(p_sums, d_one, k_of_pair, R)
        put_sum(p_sums, d_other, k_of_pair + 2 * K, R)
        acc_one += d_one
        acc_other += d_other
        # The angle's gradient is the same before the rotation as after it.
        raw_one = biased(own, own_bias, k_of_pair, first, length, G, R, K, T)
        raw_other = biased(own, own_bias, k_of_pair + 2 * K, first, length, G, R, K, T)
        d_angle = tl.permute(raw_one, (2, 0, 1)) * d_other
        d_angle = tl.sum(d_angle - tl.permute(raw_other, (2, 0, 1)) * d_one, 1)
        from_here = tl.dot(d_angle, after, input_precision="ieee")
        tl.store(d_dt + offs_head + t, tl.sum(from_here * tl.trans(rate), 0) * PI, mask=mask)
        d_turn += from_here * step[None, :]
        earlier = tl.sum(tl.where((begin < first)[None, :], d_angle, 0.0), 1)
        tl.store(d_theta + offs_chunk * K + k_of_pair, earlier)
    ptrs = d_rows + group + tl.cast(first, tl.int64) * (R * G * N)
    ptrs += tl.arange(0, T)[None, None, :] * (R * G * N)
    ptrs += tl.arange(0, R)[None, :, None] * (G * N)
    j = k_of_pair[:, None, None]
    tl.store(ptrs + j, acc_one.to(kind), mask=mask[None, None, :])
    tl.store(ptrs + 2 * K + j, acc_other.to(kind), mask=mask[None, None, :])
    j = plain_columns(K)[:, None, None]
    d_tile = tl.reshape(acc_plain, (2 * K, R, T))
    tl.store(ptrs + j, d_tile.to(kind), mask=mask[None, None, :])
    ptrs = d_angles + ((b * G + g) * length + first) * K
    ptrs += k_of_pair[:, None] + tl.arange(0, T)[None, :] * K
    tl.store(ptrs, d_turn, mask=mask[None, :])
