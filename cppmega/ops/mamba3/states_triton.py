"""The states of Mamba-3's scan before each chunk, and the gradients of those after each chunk.

Grid: heads x sequences x 2 directions. A program holds a state `[P, 4 K]` in fp32 registers, as a
rotated and a plain tile, and walks along the chunks: forwards over keys and x, or backwards over
queries, z and dO. Each is read once, except that the heads of a group share queries and keys, and
every chunk's state is written once, `[b, chunks, h, 2, p, n / 2]` in 16 bits. With everything that
crosses a chunk boundary known, the other kernels of the backward treat chunks independently.

The chain of chunks limits it: each needs two products on tensor cores after the loads, which the
pipeline issues one or two chunks ahead.
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
def _put(states, state, state_plain, K: tl.constexpr, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store both tiles `[P, 2 K]` of a state."""
    offs = state_tile(P, K)
    tl.store(states + offs, state.to(states.dtype.element_ty))
    tl.store(states + P * 2 * K + offs, state_plain.to(states.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _scan(  # type: ignore[no-untyped-def]
    tiles, bias, log_a, dt, trap, angles, theta, starts, v, v_l, weight, z, z_l, weight_z, to, b, h,
    offs_head, length, chunks, angles_l, BACKWARD: tl.constexpr, PACKED: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    kind = v.dtype.element_ty
    weight, weight_z = by_column(weight, R, P), by_column(weight_z, R, P)
    state, state_plain = tl.zeros((P, 2 * K), tl.float32), tl.zeros((P, 2 * K), tl.float32)
    for i in tl.range(chunks, disable_licm=True):
        chunk = chunks - 1 - i if BACKWARD else i
        offs_chunk = (b * chunks + chunk) * H + h
        _put(to + offs_chunk * (P * 4 * K), state, state_plain, K, P)
        first = chunk * T
        step, _, later = shares(dt, trap, offs_head, first, length, T)
        begin, last = begins(starts, first, length, PACKED, T)
        _, into, out_of, across = decays(log_a, offs_head, first, length, begin, last, T)
        rate = rates(angles, angles_l, first, length, K, T)
        cos, sin = turned(rate, step, theta + offs_chunk * K, K)
        one = turned_rows(tiles, bias, cos, sin, first, length, G, R, K, T)
        other = plain_rows(tiles, bias, first, length, G, R, K, T)
        tile, share = columns_of(v, first, length, v_l, P, T) * weight, out_of * later
        if BACKWARD:
            gate, _ = gated(columns_of(z, first, length, z_l, P, T), weight_z)
            tile, share = tile * gate, into
        v_decayed = (tl.reshape(tile, (P, R * T)) * at_rows(share, R, T)[None, :]).to(kind)
        state = tl.dot(v_decayed, one, state * across)
        state_plain = tl.dot(v_decayed, other, state_plain * across)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def states_kernel(  # type: ignore[no-untyped-def]
    queries, keys, log_a, dt, trap, angles, theta, starts, x, z, do, query_bias, key_bias,
    rank_x, rank_z, rank_out, states, gradients, length, chunks, angles_b, angles_l, x_b, x_l,
    z_b, z_l, PACKED: tl.constexpr, H: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = b * length * (R * G * 4 * K) + (h // (H // G)) * (4 * K)
    offs_head, ranks, biases = (b * H + h) * length, h * (R * P), h * (R * 4 * K)
    angles += b * angles_b
    z += b * z_b + h * P
    if tl.program_id(2) == 0:
        _scan(
            keys + group, key_bias + biases, log_a, dt, trap, angles, theta, starts,
            x + b * x_b + h * P, x_l, rank_x + ranks, z, z_l, rank_z + ranks, states, b, h,
            offs_head, length, chunks, angles_l, False, PACKED, H, G, R, K, P, T,
        )  # fmt: skip
    else:
        _scan(
            queries + group, query_bias + biases, log_a, dt, trap, angles, theta, starts,
            do + (b * length * H + h) * P, H * P, rank_out + ranks, z, z_l, rank_z + ranks,
            gradients, b, h, offs_head, length, chunks, angles_l, True, PACKED, H, G, R, K, P, T,
        )  # fmt: skip
