"""The angles of Mamba-3's heads before each chunk, and their gradients from later chunks.

Two kernels scan a sequence chunk by chunk; the third computes all chunks at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mamba3.tiles_triton import PI, begins, fraction, rates


@triton.jit  # type: ignore[untyped-decorator]
def _steps(dt, b, g, first, length, H: tl.constexpr, HEADS: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """dt `[HEADS, T]` of a group, its offsets, and its mask."""
    t = first + tl.arange(0, T)
    head = g * HEADS + tl.arange(0, HEADS)
    place = (b * H + head)[:, None] * length + t[None, :]
    here = (t < length)[None, :]
    return tl.load(dt + place, mask=here, other=0.0), place, here


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def angles_kernel(  # type: ignore[no-untyped-def]
    angles, dt, theta, length, chunks, angles_b, angles_l, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The angles of all heads of a group before each chunk, in turns between -1/2 and 1/2."""
    g, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    HEADS: tl.constexpr = H // G
    now = tl.zeros((HEADS, K), tl.float32)
    at = (g * HEADS + tl.arange(0, HEADS))[:, None] * K + tl.arange(0, K)[None, :]
    for chunk in range(chunks):
        tl.store(theta + (b * chunks + chunk) * (H * K) + at, now)
        rate = rates(angles + b * angles_b, angles_l, chunk * T, length, K, T)
        step, _, _ = _steps(dt, b, g, chunk * T, length, H, HEADS, T)
        # tf32 would be far too inaccurate, and Triton turns a sum of products into a tf32 product.
        now = fraction(tl.dot(step * 0.5, rate, now, input_precision="ieee"))


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def later_kernel(  # type: ignore[no-untyped-def]
    d_theta, starts, from_later, length, chunks, of_side, PACKED: tl.constexpr, H: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Gradients of a head's angles from the chunks after each one, the sums of both sides'."""
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k = tl.arange(0, K)
    now = tl.zeros((K,), tl.float32)
    for number in range(chunks):
        chunk = chunks - 1 - number
        at = ((b * chunks + chunk) * H + h) * K + k
        tl.store(from_later + at, now)
        _, last = begins(starts, chunk * T, length, PACKED, T)
        more = tl.load(d_theta + at) + tl.load(d_theta + of_side + at)
        now = tl.where(last < chunk * T, now, 0.0) + more


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def angles_backward_kernel(  # type: ignore[no-untyped-def]
    angles, dt, starts, from_later, of_angles, of_dt, d_angles, d_dt, length, chunks, angles_b,
    angles_l, side_of_angles, side_of_dt, PACKED: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's angles, summed over a group's heads, and of their dt.

    To those from its own tokens, of both sides, the ones from later chunks are added.
    """
    chunk, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    HEADS: tl.constexpr = H // G
    first = chunk * T
    t = first + tl.arange(0, T)
    _, last = begins(starts, first, length, PACKED, T)
    rate = rates(angles + b * angles_b, angles_l, first, length, K, T)
    step, place, here = _steps(dt, b, g, first, length, H, HEADS, T)
    head = g * HEADS + tl.arange(0, HEADS)
    at = ((b * chunks + chunk) * H + head)[:, None] * K + tl.arange(0, K)[None, :]
    later = tl.load(from_later + at)
    same = (t >= last)[None, :]
    of_step = tl.sum(later[:, None, :] * rate[None, :, :], 2) * PI
    found = tl.load(of_dt + place, mask=here, other=0.0)
    found += tl.load(of_dt + side_of_dt + place, mask=here, other=0.0)
    tl.store(d_dt + place, found + tl.where(same, of_step, 0.0), mask=here)
    turning = tl.sum(later[:, None, :] * tl.where(same, step, 0.0)[:, :, None], 0)
    own = ((b * G + g) * length + t)[:, None] * K + tl.arange(0, K)[None, :]
    known = (t < length)[:, None]
    turning += tl.load(of_angles + own, mask=known, other=0.0)
    turning += tl.load(of_angles + side_of_angles + own, mask=known, other=0.0)
    tl.store(d_angles + own, (1.0 - rate * rate) * turning * PI, mask=known)
