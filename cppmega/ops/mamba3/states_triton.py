"""The states of Mamba-3's scan before each chunk, and the gradients of those after each chunk.

One launch computes both: a program scans a head of a sequence in one of the two directions. The
backward of the scan then has everything that crosses a chunk boundary, so that its chunks are
independent of each other. States are `[b, chunks, h, 2, p, n / 2]`: first the columns that are
rotated, then the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mamba3.tiles_triton import (
    at_rows,
    begins,
    by_column,
    columns_of,
    decays,
    gated,
    plain_rows,
    rates,
    shares,
    state_tile,
    turned,
    turned_rows,
)


@triton.jit  # type: ignore[untyped-decorator]
def _put(states, turning, plain, K: tl.constexpr, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store both tiles `[P, 2 K]` of a state."""
    at = state_tile(P, K)
    tl.store(states + at, turning.to(states.dtype.element_ty))
    tl.store(states + P * 2 * K + at, plain.to(states.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _scan(  # type: ignore[no-untyped-def]
    tiles, bias, log_a, dt, trap, angles, theta, starts, v, v_l, weight, z, z_l, weight_z, to, b, h,
    of_head, length, chunks, angles_l, BACKWARD: tl.constexpr, PACKED: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    kind = v.dtype.element_ty
    weight, weight_z = by_column(weight, R, P), by_column(weight_z, R, P)
    turning, plain = tl.zeros((P, 2 * K), tl.float32), tl.zeros((P, 2 * K), tl.float32)
    for number in tl.range(chunks, disable_licm=True):
        chunk = chunks - 1 - number if BACKWARD else number
        of_chunk = (b * chunks + chunk) * H + h
        _put(to + of_chunk * (P * 4 * K), turning, plain, K, P)
        first = chunk * T
        step, _, later = shares(dt, trap, of_head, first, length, T)
        begin, last = begins(starts, first, length, PACKED, T)
        _, into, out_of, across = decays(log_a, of_head, first, length, begin, last, T)
        rate = rates(angles, angles_l, first, length, K, T)
        cos, sin = turned(rate, step, theta + of_chunk * K, K)
        one = turned_rows(tiles, bias, cos, sin, first, length, G, R, K, T)
        other = plain_rows(tiles, bias, first, length, G, R, K, T)
        found, share = columns_of(v, first, length, v_l, P, T) * weight, out_of * later
        if BACKWARD:
            gate, _ = gated(columns_of(z, first, length, z_l, P, T), weight_z)
            found, share = found * gate, into
        left = (tl.reshape(found, (P, R * T)) * at_rows(share, R, T)[None, :]).to(kind)
        turning = tl.dot(left, one, turning * across)
        plain = tl.dot(left, other, plain * across)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def states_kernel(  # type: ignore[no-untyped-def]
    queries, keys, log_a, dt, trap, angles, theta, starts, x, z, given, query_bias, key_bias,
    rank_x, rank_z, rank_out, states, gradients, length, chunks, angles_b, angles_l, x_b, x_l,
    z_b, z_l, PACKED: tl.constexpr, H: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = b * length * (R * G * 4 * K) + (h // (H // G)) * (4 * K)
    of_head, ranks, biases = (b * H + h) * length, h * (R * P), h * (R * 4 * K)
    angles += b * angles_b
    z += b * z_b + h * P
    if tl.program_id(2) == 0:
        _scan(
            keys + group, key_bias + biases, log_a, dt, trap, angles, theta, starts,
            x + b * x_b + h * P, x_l, rank_x + ranks, z, z_l, rank_z + ranks, states, b, h,
            of_head, length, chunks, angles_l, False, PACKED, H, G, R, K, P, T,
        )  # fmt: skip
    else:
        _scan(
            queries + group, query_bias + biases, log_a, dt, trap, angles, theta, starts,
            given + (b * length * H + h) * P, H * P, rank_out + ranks, z, z_l, rank_z + ranks,
            gradients, b, h, of_head, length, chunks, angles_l, True, PACKED, H, G, R, K, P, T,
        )  # fmt: skip
