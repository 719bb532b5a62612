"""All gradients of Mamba-3's scan, from the states at the chunk boundaries and their gradients.

The kernel is launched twice, as the same computation with the two sides exchanged: first for
queries and the gradient of the output, then for keys and values. A program handles some chunks of a
group, and in each of them the group's heads one after another, so that the gradients of queries or
keys, which these heads share, are summed in registers. The gradients of a head's parameters are
summed in the program's own slice of `sums`; the slices are added later, in a fixed order. To
gradients with terms from both sides, the launch for keys adds its terms to those that the launch
for queries has stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cppmega.ops.mamba3_scan_tiles_triton import (
    PI,
    at_rows,
    begins,
    between,
    by_rank,
    decays,
    gated,
    of_tokens,
    plain_columns,
    rates,
    rows,
    shares,
    turned,
    values,
    weighed,
)


@triton.jit  # type: ignore[untyped-decorator]
def _pairs(x, R: tl.constexpr, K: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first and second elements of all pairs of a rotated tile, `[R, T, K]` each."""
    return tl.split(tl.reshape(x, (R, T, K, 2)))


@triton.jit  # type: ignore[untyped-decorator]
def _unturned(x, found, cos, sin, R: tl.constexpr, K: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradients of both elements of the pairs before their rotation, and of the angles, `[T, K]`.

    Args:
        x: the rotated tile.
        found: its gradient.
        cos: `[T, K]`.
        sin: `[T, K]`.
    """
    one, other = _pairs(x, R, K, T)
    d_one, d_other = _pairs(found, R, K, T)
    of_angle = tl.sum(one.to(tl.float32) * d_other - other.to(tl.float32) * d_one, 0)
    c, s = cos[None, :, :], sin[None, :, :]
    return d_one * c + d_other * s, d_other * c - d_one * s, of_angle


@triton.jit  # type: ignore[untyped-decorator]
def _add(sums, x, columns, R: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the sum over tokens of `[R, T, columns]` to a part of `[R, WIDTH]`."""
    place = sums + tl.arange(0, R)[:, None] * WIDTH + columns[None, :]
    tl.store(place, tl.load(place) + tl.sum(x, 1))


@triton.jit  # type: ignore[untyped-decorator]
def _more(place, x, here, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store x, or add it to what is stored there."""
    if ADD:
        x += tl.load(place, mask=here, other=0.0)
    tl.store(place, x, mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def backward_kernel(  # type: ignore[no-untyped-def]
    queries, keys, log_a, dt, trap, angles, theta, starts, x, z, given, query_bias, key_bias, skip,
    rank_x, rank_z, rank_out, states, of_queries, d_rows, d_values, d_log_a, d_at_once, d_next,
    d_dt, d_angles, d_theta, d_skip, sums, length, chunks, angles_b, angles_l, x_b, x_l, z_b, z_l,
    KEYS: tl.constexpr, PACKED: tl.constexpr, H: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, T: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kind = x.dtype.element_ty
    HEADS: tl.constexpr = H // G
    N: tl.constexpr = 4 * K
    SUMS: tl.constexpr = R * (N + 2 * P)
    group = b * length * (R * G * N) + g * N
    program = (b * G + g) * tl.num_programs(0) + tl.program_id(0)
    begin_of_all = tl.program_id(0) * CHUNKS
    for chunk in range(begin_of_all, tl.minimum(begin_of_all + CHUNKS, chunks)):
        first = chunk * T
        t, p = first + tl.arange(0, T), tl.arange(0, P)
        here = t < length
        begin, last = begins(starts, first, length, PACKED, T)
        rate = rates(angles + b * angles_b, angles_l, first, length, K, T)
        # For each token, itself and the later ones of its document and chunk.
        after = (t[None, :] >= t[:, None]) & (begin[None, :] <= t[:, None])
        all_one, all_other = tl.zeros((R, T, K), tl.float32), tl.zeros((R, T, K), tl.float32)
        all_plain = tl.zeros((R, T, 2 * K), tl.float32)
        turning = tl.zeros((T, K), tl.float32)
        for head in tl.range(HEADS, disable_licm=True):
            h = g * HEADS + head
            of_head = (b * H + h) * length
            of_chunk = (b * chunks + chunk) * H + h
            own = sums + (program * HEADS + head) * SUMS
            step, at_once, later = shares(dt, trap, of_head, first, length, T)
            since, into, out_of, across = decays(log_a, of_head, first, length, begin, last, T)
            cos, sin = turned(rate, step, theta + of_chunk * K, K)
            q, q_plain = rows(
                queries + group, query_bias + h * (R * N), cos, sin, first, length,
                R * G * N, G * N, R, K, T,
            )  # fmt: skip
            k, k_plain = rows(
                keys + group, key_bias + h * (R * N), cos, sin, first, length,
                R * G * N, G * N, R, K, T,
            )  # fmt: skip
            at_x, at_z = x + b * x_b + h * P, z + b * z_b + h * P
            at_given = given + (b * length * H + h) * P
            weight_x, weight_z = rank_x + h * (R * P), rank_z + h * (R * P)
            weight_out = rank_out + h * (R * P)
            v = values(at_x, first, length, x_l, P, T) * by_rank(weight_x, R, P)
            gate, _ = gated(values(at_z, first, length, z_l, P, T), by_rank(weight_z, R, P))
            dy = values(at_given, first, length, H * P, P, T) * by_rank(weight_out, R, P) * gate
            if not KEYS:
                tl.store(d_skip + of_chunk, tl.sum(dy * v))
            v = tl.reshape(v.to(kind), (R * T, P))
            dy = tl.reshape(dy.to(kind), (R * T, P))
            decay, itself = between(since, begin, first, T)
            weight = tl.where(itself, at_once[None, :], decay * later[None, :])
            if KEYS:
                one, plain, other, other_plain = k, k_plain, q, q_plain
                mine, theirs, share = v, dy, out_of * later
                weight = tl.trans(weight)
            else:
                one, plain, other, other_plain = q, q_plain, k, k_plain
                mine, theirs, share = dy, v, into
            at = tl.arange(0, P)[:, None] * (2 * K) + tl.arange(0, 2 * K)[None, :]
            of_state = of_chunk * (P * N) + at
            state = tl.load(states + of_state)
            state_plain = tl.load(states + of_state + P * 2 * K)
            # Within the chunk.
            scores = tl.dot(plain, tl.trans(other_plain), tl.dot(one, tl.trans(other)))
            products = tl.dot(mine, tl.trans(theirs))
            mixing = weighed(scores, weight, R, T).to(kind)
            d_scores = weighed(products, weight, R, T).to(kind)
            if not KEYS:
                of_weight = tl.reshape(products * scores, (R, T, R, T))
                of_weight = tl.sum(tl.sum(of_weight, 2), 0)  # [T, T]
                of_at_once = tl.sum(tl.where(itself, of_weight, 0.0), 0)
                of_weight *= decay
                of_later = tl.sum(of_weight, 0)
                of_since = tl.sum(of_weight * later[None, :], 1) - later * of_later
            share_rows = at_rows(share, R, T)[:, None]
            # The gradients of queries or keys, and of the angles by which they were rotated.
            found = tl.dot(d_scores, other, tl.dot(mine, state) * share_rows)
            d_one, d_other, of_angle = _unturned(one, found, cos, sin, R, K, T)
            _add(own, d_one, tl.arange(0, K), R, N)
            _add(own, d_other, tl.arange(0, K) + 2 * K, R, N)
            all_one += d_one
            all_other += d_other
            found = tl.dot(d_scores, other_plain, tl.dot(mine, state_plain) * share_rows)
            found = tl.reshape(found, (R, T, 2 * K))
            _add(own, found, plain_columns(K), R, N)
            all_plain += found
            from_here = tl.dot(after.to(tl.float32), of_angle, input_precision="ieee")
            _more(d_dt + of_head + t, tl.sum(from_here * rate, 1) * PI, here, KEYS)
            turning += from_here * step[:, None]
            earlier = tl.sum(tl.where((begin < first)[:, None], of_angle, 0.0), 0)
            _more(d_theta + of_chunk * K + tl.arange(0, K), earlier, tl.arange(0, K) < K, KEYS)
            # Across the chunk boundary, through this side's state. From here on, tensors that are
            # needed again are loaded again instead of being held in registers.
            found = tl.dot(plain, tl.trans(state_plain), tl.dot(one, tl.trans(state)))
            of_share = of_tokens(tl.sum(mine.to(tl.float32) * found, 1), R, T)
            found = tl.dot(mixing, theirs, found * share_rows)
            if KEYS:
                of_later = out_of * of_share
                of_since = -share * of_share
                before = tl.load(of_queries + of_state).to(tl.float32)
                of_across = tl.sum(before * tl.load(states + of_state).to(tl.float32))
                of_state += P * 2 * K
                before = tl.load(of_queries + of_state).to(tl.float32)
                of_across += tl.sum(before * tl.load(states + of_state).to(tl.float32))
                of_whole = tl.sum(share * of_share, 0) + of_across * across
                _more(d_at_once + of_head + t, of_later, here, True)
            else:
                of_since += share * of_share
                of_whole = 0.0
                tl.store(d_at_once + of_head + t, of_at_once + of_later, mask=here)
            _more(d_next + of_head + t, of_later, here, KEYS)
            of_log = tl.cumsum(of_since, 0, reverse=True) + of_whole
            _more(d_log_a + of_head + t, of_log, here, KEYS)
            found = tl.reshape(found, (R, T, P))
            by_z, by_out = by_rank(weight_z, R, P), by_rank(weight_out, R, P)
            direct = tl.load(skip + h)
            if KEYS:
                gate, _ = gated(values(at_z, first, length, z_l, P, T), by_z)
                found += direct * values(at_given, first, length, H * P, P, T) * by_out * gate
                of_value = found * by_rank(weight_x, R, P)
                found *= values(at_x, first, length, x_l, P, T)
            else:
                found += direct * values(at_x, first, length, x_l, P, T) * by_rank(weight_x, R, P)
                found *= values(at_given, first, length, H * P, P, T)
                of_z = values(at_z, first, length, z_l, P, T)
                gate, slope = gated(of_z, by_z)
                _add(own + R * (N + P), found * gate, p, R, P)
                found *= by_out * slope
                of_value = found * by_z
                found *= of_z
            _add(own + R * N, found, p, R, P)
            place = d_values + ((b * length + first) * H + h) * P
            place += tl.arange(0, T)[:, None] * (H * P) + p[None, :]
            tl.store(place, tl.sum(of_value, 0).to(kind), mask=here[:, None])
        place = d_rows + group + tl.cast(first, tl.int64) * (R * G * N)
        place += tl.arange(0, T)[None, :, None] * (R * G * N)
        place += tl.arange(0, R)[:, None, None] * (G * N)
        j = tl.arange(0, K)[None, None, :]
        tl.store(place + j, all_one.to(kind), mask=here[None, :, None])
        tl.store(place + 2 * K + j, all_other.to(kind), mask=here[None, :, None])
        j = plain_columns(K)[None, None, :]
        tl.store(place + j, all_plain.to(kind), mask=here[None, :, None])
        place = d_angles + ((b * G + g) * length + first) * K
        place += tl.arange(0, T)[:, None] * K + tl.arange(0, K)[None, :]
        _more(place, turning, here[:, None], KEYS)
