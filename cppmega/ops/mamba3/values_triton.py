"""The gradients of Mamba-3's values, gates and decays, all chunks in parallel.

Grid: heads x chunks x sequences. A program recomputes its chunk's output before the gate from the
state before the chunk, and multiplies the gradients by the transposed weights. It holds the tiles
`[P, R * T]` of values and output gradients and the scores `[R * T, R * T]`; four tiles `[P, 2 K]`
of states and their gradients are read once. x, z and dO are read two or three times, because Triton
would spill what is held across a store. The gradients of x, z and the scalars are written once;
sums over chunks are stored per chunk and added later, in a fixed order.

Latency limits it (`benchmarks/results/mamba3_scan_designs.md`): with 255 registers per thread, two
programs of four warps fit on an SM, which use a third of the issue slots and 14 % of HBM bandwidth.
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
    factors,
    gated,
    of_tokens,
    plain_rows,
    put_sum,
    put_values,
    rates,
    shares,
    state_tile,
    turned,
    turned_rows,
    weighed,
)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def values_kernel(  # type: ignore[no-untyped-def]
    queries, keys, log_a, dt, trap, angles, theta, starts, x, z, do, query_bias, key_bias, skip,
    rank_x, rank_z, rank_out, states, gradients, d_x, d_z, d_log_a, d_at_once, d_next, d_skip, sums,
    length, chunks, angles_b, angles_l, x_b, x_l, z_b, z_l, PACKED: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    h, chunk, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kind = x.dtype.element_ty
    first = chunk * T
    t, p = first + tl.arange(0, T), tl.arange(0, P)
    mask = t < length
    group = b * length * (R * G * 4 * K) + (h // (H // G)) * (4 * K)
    offs_head, offs_chunk = (b * H + h) * length, (b * chunks + chunk) * H + h
    step, at_once, later = shares(dt, trap, offs_head, first, length, T)
    begin, last = begins(starts, first, length, PACKED, T)
    since, into, out_of, across = decays(log_a, offs_head, first, length, begin, last, T)
    rate = rates(angles + b * angles_b, angles_l, first, length, K, T)
    cos, sin = turned(rate, step, theta + offs_chunk * K, K)
    q_bias, k_bias = query_bias + h * (R * 4 * K), key_bias + h * (R * 4 * K)
    q = turned_rows(queries + group, q_bias, cos, sin, first, length, G, R, K, T)
    k = turned_rows(keys + group, k_bias, cos, sin, first, length, G, R, K, T)
    q_plain = plain_rows(queries + group, q_bias, first, length, G, R, K, T)
    k_plain = plain_rows(keys + group, k_bias, first, length, G, R, K, T)
    at_x, at_z = x + b * x_b + h * P, z + b * z_b + h * P
    offs_h = (b * length * H + h) * P
    weight_x, weight_z, weight_out = (
        rank_x + h * (R * P),
        rank_z + h * (R * P),
        rank_out + h * (R * P),
    )
    v, dy = factors(
        at_x, at_z, do + offs_h, weight_x, weight_z, weight_out, first, length, x_l, z_l, H * P,
        R, P, T,
    )  # fmt: skip
    weight, decay, itself = between(since, begin, first, at_once, later, T)
    # The weights between tokens, with a row for each key, and the gradients of their parts.
    scores = tl.dot(k_plain, tl.trans(q_plain), tl.dot(k, tl.trans(q)))
    products = tl.dot(tl.trans(v), dy)
    mixing = weighed(scores, weight, R, T).to(kind)
    row, column = tl.arange(0, R * T)[:, None], tl.arange(0, R * T)[None, :]
    d_direct = tl.reshape(tl.sum(tl.where(row == column, products, 0.0), 1), (R, T))
    tl.store(d_skip + offs_head + t, tl.sum(d_direct, 0), mask=mask)
    d_weight = tl.sum(tl.sum(tl.reshape(products * scores, (R, T, R, T)), 2), 0)  # [T, T]
    d_itself = tl.sum(tl.where(itself, d_weight, 0.0), 1)
    d_weight *= decay
    d_later = tl.sum(d_weight, 1)
    d_since = tl.sum(d_weight * later[:, None], 0) - later * d_later
    # The contributions that cross the chunk's boundaries.
    offs_state = offs_chunk * (P * 4 * K) + state_tile(P, K)
    state, state_plain = tl.load(states + offs_state), tl.load(states + offs_state + P * 2 * K)
    d_state = tl.load(gradients + offs_state)
    d_state_plain = tl.load(gradients + offs_state + P * 2 * K)
    y = tl.dot(state_plain, tl.trans(q_plain), tl.dot(state, tl.trans(q)))
    d_v = tl.dot(d_state_plain, tl.trans(k_plain), tl.dot(d_state, tl.trans(k)))
    d_across = tl.sum(state.to(tl.float32) * d_state.to(tl.float32))
    d_across += tl.sum(state_plain.to(tl.float32) * d_state_plain.to(tl.float32))
    d_since += into * of_tokens(dy.to(tl.float32) * y, R, P, T)
    d_share = out_of * of_tokens(v.to(tl.float32) * d_v, R, P, T)
    d_later += d_share
    d_since -= later * d_share
    # Scans, since Triton 3.6 cannot compile a sum to a scalar after a product for sm_100.
    d_whole = later * d_share
    d_log = tl.cumsum(d_since + d_whole, 0, reverse=True) + tl.cumsum(d_whole, 0) - d_whole
    tl.store(d_log_a + offs_head + t, d_log + d_across * across, mask=mask)
    tl.store(d_at_once + offs_head + t, d_itself + d_later, mask=mask)
    tl.store(d_next + offs_head + t, d_later, mask=mask)
    # The gradient of the values. After a store, tensors are loaded again instead of being held.
    # Loads that come after the product would make Triton add in their layout, across warps.
    p_sums, direct = sums + offs_chunk * (3 * R * P), tl.load(skip + h)
    x_t, w_x = columns_of(at_x, first, length, x_l, P, T), by_column(weight_x, R, P)
    d_v = tl.dot(dy, tl.trans(mixing), d_v * at_rows(out_of * later, R, T)[None, :])
    d_v = tl.reshape(d_v + direct * dy.to(tl.float32), (P, R, T))
    put_sum(p_sums + 2 * R * P, d_v * x_t, p, R)
    d_v = tl.sum(d_v * w_x, 1)
    put_values(d_x + offs_h, d_v, first, length, H * P, P, T)
    # The output before the gate, and the gradients of what follows it.
    v_again = columns_of(at_x, first, length, x_l, P, T) * by_column(weight_x, R, P)
    d_gated = columns_of(do + offs_h, first, length, H * P, P, T)
    z_t, w_z = columns_of(at_z, first, length, z_l, P, T), by_column(weight_z, R, P)
    gate, slope = gated(z_t, w_z)
    w_out = by_column(weight_out, R, P)
    y = tl.reshape(tl.dot(v, mixing, y * at_rows(into, R, T)[None, :]), (P, R, T))
    d_gated *= y + direct * v_again
    put_sum(p_sums, d_gated * gate, p, R)
    d_gated = d_gated * slope * w_out
    put_sum(p_sums + R * P, d_gated * z_t, p, R)
    put_values(d_z + offs_h, tl.sum(d_gated * w_z, 1), first, length, H * P, P, T)
