"""Gradients of Mamba-3's values, gates and scalars, from the states at the chunk boundaries.

A program handles a head of a chunk, in both directions at once: the output before the gate is
computed again, and its gradients are multiplied by the transposed weights. What is summed over
chunks is stored by chunk and added later, in a fixed order.
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
    queries, keys, log_a, dt, trap, angles, theta, starts, x, z, given, query_bias, key_bias, skip,
    rank_x, rank_z, rank_out, states, gradients, d_x, d_z, d_log_a, d_at_once, d_next, d_skip, sums,
    length, chunks, angles_b, angles_l, x_b, x_l, z_b, z_l, PACKED: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    h, chunk, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kind = x.dtype.element_ty
    first = chunk * T
    t, p = first + tl.arange(0, T), tl.arange(0, P)
    here = t < length
    group = b * length * (R * G * 4 * K) + (h // (H // G)) * (4 * K)
    of_head, of_chunk = (b * H + h) * length, (b * chunks + chunk) * H + h
    step, at_once, later = shares(dt, trap, of_head, first, length, T)
    begin, last = begins(starts, first, length, PACKED, T)
    since, into, out_of, across = decays(log_a, of_head, first, length, begin, last, T)
    rate = rates(angles + b * angles_b, angles_l, first, length, K, T)
    cos, sin = turned(rate, step, theta + of_chunk * K, K)
    of_q, of_k = query_bias + h * (R * 4 * K), key_bias + h * (R * 4 * K)
    q = turned_rows(queries + group, of_q, cos, sin, first, length, G, R, K, T)
    k = turned_rows(keys + group, of_k, cos, sin, first, length, G, R, K, T)
    q_plain = plain_rows(queries + group, of_q, first, length, G, R, K, T)
    k_plain = plain_rows(keys + group, of_k, first, length, G, R, K, T)
    at_x, at_z = x + b * x_b + h * P, z + b * z_b + h * P
    of_h = (b * length * H + h) * P
    weight_x, weight_z, weight_out = (
        rank_x + h * (R * P),
        rank_z + h * (R * P),
        rank_out + h * (R * P),
    )
    v, dy = factors(
        at_x, at_z, given + of_h, weight_x, weight_z, weight_out, first, length, x_l, z_l, H * P,
        R, P, T,
    )  # fmt: skip
    weight, decay, itself = between(since, begin, first, at_once, later, T)
    # The weights between tokens, with a row for each key, and the gradients of their parts.
    scores = tl.dot(k_plain, tl.trans(q_plain), tl.dot(k, tl.trans(q)))
    products = tl.dot(tl.trans(v), dy)
    mixing = weighed(scores, weight, R, T).to(kind)
    row, column = tl.arange(0, R * T)[:, None], tl.arange(0, R * T)[None, :]
    of_skip = tl.reshape(tl.sum(tl.where(row == column, products, 0.0), 1), (R, T))
    tl.store(d_skip + of_head + t, tl.sum(of_skip, 0), mask=here)
    of_weight = tl.sum(tl.sum(tl.reshape(products * scores, (R, T, R, T)), 2), 0)  # [T, T]
    of_at_once = tl.sum(tl.where(itself, of_weight, 0.0), 1)
    of_weight *= decay
    of_later = tl.sum(of_weight, 1)
    of_since = tl.sum(of_weight * later[:, None], 0) - later * of_later
    # What crosses the chunk's boundaries.
    of_state = of_chunk * (P * 4 * K) + state_tile(P, K)
    state, state_plain = tl.load(states + of_state), tl.load(states + of_state + P * 2 * K)
    after, after_plain = tl.load(gradients + of_state), tl.load(gradients + of_state + P * 2 * K)
    y = tl.dot(state_plain, tl.trans(q_plain), tl.dot(state, tl.trans(q)))
    of_value = tl.dot(after_plain, tl.trans(k_plain), tl.dot(after, tl.trans(k)))
    of_across = tl.sum(state.to(tl.float32) * after.to(tl.float32))
    of_across += tl.sum(state_plain.to(tl.float32) * after_plain.to(tl.float32))
    of_since += into * of_tokens(dy.to(tl.float32) * y, R, P, T)
    of_share = out_of * of_tokens(v.to(tl.float32) * of_value, R, P, T)
    of_later += of_share
    of_since -= later * of_share
    # Scans, since Triton 3.6 cannot compile a sum to a scalar after a product for sm_100.
    of_whole = later * of_share
    of_log = tl.cumsum(of_since + of_whole, 0, reverse=True) + tl.cumsum(of_whole, 0) - of_whole
    tl.store(d_log_a + of_head + t, of_log + of_across * across, mask=here)
    tl.store(d_at_once + of_head + t, of_at_once + of_later, mask=here)
    tl.store(d_next + of_head + t, of_later, mask=here)
    # The gradient of the values. After a store, tensors are loaded again instead of being held.
    # Loads that come after the product would make Triton add in their layout, across warps.
    own, direct = sums + of_chunk * (3 * R * P), tl.load(skip + h)
    of_x, by_x = columns_of(at_x, first, length, x_l, P, T), by_column(weight_x, R, P)
    of_value = tl.dot(dy, tl.trans(mixing), of_value * at_rows(out_of * later, R, T)[None, :])
    of_value = tl.reshape(of_value + direct * dy.to(tl.float32), (P, R, T))
    put_sum(own + 2 * R * P, of_value * of_x, p, R)
    of_value = tl.sum(of_value * by_x, 1)
    put_values(d_x + of_h, of_value, first, length, H * P, P, T)
    # The output before the gate, and the gradients of what follows it.
    again = columns_of(at_x, first, length, x_l, P, T) * by_column(weight_x, R, P)
    of_gated = columns_of(given + of_h, first, length, H * P, P, T)
    of_z, by_z = columns_of(at_z, first, length, z_l, P, T), by_column(weight_z, R, P)
    gate, slope = gated(of_z, by_z)
    by_out = by_column(weight_out, R, P)
    y = tl.reshape(tl.dot(v, mixing, y * at_rows(into, R, T)[None, :]), (P, R, T))
    of_gated *= y + direct * again
    put_sum(own, of_gated * gate, p, R)
    of_gated = of_gated * slope * by_out
    put_sum(own + R * P, of_gated * of_z, p, R)
    put_values(d_z + of_h, tl.sum(of_gated * by_z, 1), first, length, H * P, P, T)
