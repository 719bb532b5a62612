"""Mamba-3's scan with the gate and the sum over ranks: one program per head and sequence.

The state stays in registers, and only the output is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cppmega.ops.mamba3_scan_tiles_triton import (
    at_rows,
    begins,
    between,
    by_rank,
    decays,
    gated,
    rates,
    rows,
    shares,
    turned,
    values,
    weighed,
)


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
    of_head = (b * H + h) * length
    weight_x, weight_z, weight_out = (
        by_rank(rank_x + h * (R * P), R, P),
        by_rank(rank_z + h * (R * P), R, P),
        by_rank(rank_out + h * (R * P), R, P),
    )
    direct = tl.load(skip + h)
    turning, plain = tl.zeros((P, 2 * K), tl.float32), tl.zeros((P, 2 * K), tl.float32)
    for chunk in tl.range(chunks, disable_licm=True):
        first = chunk * T
        step, at_once, later = shares(dt, trap, of_head, first, length, T)
        begin, last = begins(starts, first, length, PACKED, T)
        since, into, out_of, across = decays(log_a, of_head, first, length, begin, last, T)
        rate = rates(angles + b * angles_b, angles_l, first, length, K, T)
        cos, sin = turned(rate, step, theta + ((b * chunks + chunk) * H + h) * K, K)
        q, q_plain = rows(
            queries + group, query_bias + h * (R * 4 * K), cos, sin, first, length,
            R * G * 4 * K, G * 4 * K, R, K, T,
        )  # fmt: skip
        k, k_plain = rows(
            keys + group, key_bias + h * (R * 4 * K), cos, sin, first, length,
            R * G * 4 * K, G * 4 * K, R, K, T,
        )  # fmt: skip
        v = values(x + b * x_b + h * P, first, length, x_l, P, T) * weight_x
        v = tl.reshape(v, (R * T, P))
        decay, itself = between(since, begin, first, T)
        weight = tl.where(itself, at_once[None, :], decay * later[None, :])
        scores = tl.dot(q_plain, tl.trans(k_plain), tl.dot(q, tl.trans(k)))
        y = tl.dot(q_plain, tl.trans(plain.to(kind)), tl.dot(q, tl.trans(turning.to(kind))))
        y = y * at_rows(into, R, T)[:, None] + direct * v
        y = tl.dot(weighed(scores, weight, R, T).to(kind), v.to(kind), y)
        gate, _ = gated(values(z + b * z_b + h * P, first, length, z_l, P, T), weight_z)
        y = tl.sum(tl.reshape(y, (R, T, P)) * gate * weight_out, 0)
        t, p = tl.arange(0, T)[:, None], tl.arange(0, P)[None, :]
        place = out + ((b * length + first) * H + h) * P + t * (H * P) + p
        tl.store(place, y.to(kind), mask=first + t < length)
        left = tl.trans((v * at_rows(out_of * later, R, T)[:, None]).to(kind))
        turning = tl.dot(left, k, turning * across)
        plain = tl.dot(left, k_plain, plain * across)
