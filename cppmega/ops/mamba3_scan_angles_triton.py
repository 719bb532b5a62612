"""The angles of Mamba-3's heads before each chunk, and their gradients from later chunks.

In both kernels, a program scans a sequence chunk by chunk for all heads of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cppmega.ops.mamba3_scan_tiles_triton import PI, begins, fraction, rates


@triton.jit  # type: ignore[untyped-decorator]
def _steps(dt, b, g, first, length, H: tl.constexpr, HEADS: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """dt `[HEADS, T]` of a group, its offsets, and its mask."""
    t = first + tl.arange(0, T)
    head = g * HEADS + tl.arange(0, HEADS)
    place = (b * H + head)[:, None] * length + t[None, :]
    here = (t < length)[None, :]
    return tl.load(dt + place, mask=here, other=0.0), place, here


@triton.jit  # type: ignore[untyped-decorator]
def angles_kernel(  # type: ignore[no-untyped-def]
    angles, dt, theta, length, chunks, angles_b, angles_l, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
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


@triton.jit  # type: ignore[untyped-decorator]
def angles_backward_kernel(  # type: ignore[no-untyped-def]
    angles, dt, starts, d_theta, d_angles, d_dt, length, chunks, angles_b, angles_l,
    PACKED: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    g, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    HEADS: tl.constexpr = H // G
    from_later = tl.zeros((HEADS, K), tl.float32)
    at = (g * HEADS + tl.arange(0, HEADS))[:, None] * K + tl.arange(0, K)[None, :]
    for number in range(chunks):
        chunk = chunks - 1 - number
        first = chunk * T
        t = first + tl.arange(0, T)
        _, last = begins(starts, first, length, PACKED, T)
        rate = rates(angles + b * angles_b, angles_l, first, length, K, T)
        step, place, here = _steps(dt, b, g, first, length, H, HEADS, T)
        same = (t >= last)[None, :]
        of_step = tl.sum(from_later[:, None, :] * rate[None, :, :], 2) * PI
        before = tl.load(d_dt + place, mask=here, other=0.0)
        tl.store(d_dt + place, before + tl.where(same, of_step, 0.0), mask=here)
        turning = tl.sum(from_later[:, None, :] * tl.where(same, step, 0.0)[:, :, None], 0)
        own = ((b * G + g) * length + t)[:, None] * K + tl.arange(0, K)[None, :]
        known = (t < length)[:, None]
        turning += tl.load(d_angles + own, mask=known, other=0.0)
        tl.store(d_angles + own, (1.0 - rate * rate) * turning * PI, mask=known)
        more = tl.load(d_theta + (b * chunks + chunk) * (H * K) + at)
        from_later = tl.where(last < first, from_later, 0.0) + more
