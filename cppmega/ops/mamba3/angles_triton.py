"""Mamba-3's angles at the chunk boundaries, and the gradients of angles and dt.

`angles_kernel` and `later_kernel` are scans over chunks, forwards and backwards: a program per
group or head of a sequence holds the running sum in registers, reads its inputs once and writes one
value per chunk, head and angle. They have few programs, so the latency of the chain limits them.
`angles_backward_kernel` treats all chunks in parallel and sums over a group's heads. All three
compute in fp32 on CUDA cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mamba3.tiles_triton import PI, begins, fraction, rates


@triton.jit  # type: ignore[untyped-decorator]
def _steps(dt, b, g, first, length, H: tl.constexpr, HEADS: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load dt `[HEADS, T]` of a group; returns it with its offsets and its mask."""
    t = first + tl.arange(0, T)
    head = g * HEADS + tl.arange(0, HEADS)
    offs = (b * H + head)[:, None] * length + t[None, :]
    mask = (t < length)[None, :]
    return tl.load(dt + offs, mask=mask, other=0.0), offs, mask


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def angles_kernel(  # type: ignore[no-untyped-def]
    angles, dt, theta, length, chunks, angles_b, angles_l, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The angles of a group's heads before each chunk, in turns between -1/2 and 1/2.

    Grid: groups x sequences; a program holds the angles `[H / G, K]` of its heads.
    """
    g, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    HEADS: tl.constexpr = H // G
    acc = tl.zeros((HEADS, K), tl.float32)
    offs = (g * HEADS + tl.arange(0, HEADS))[:, None] * K + tl.arange(0, K)[None, :]
    for chunk in range(chunks):
        tl.store(theta + (b * chunks + chunk) * (H * K) + offs, acc)
        rate = rates(angles + b * angles_b, angles_l, chunk * T, length, K, T)
        dt_t, _, _ = _steps(dt, b, g, chunk * T, length, H, HEADS, T)
        # tf32 would be far too inaccurate, and Triton turns a sum of products into a tf32 product.
        acc = fraction(tl.dot(dt_t * 0.5, rate, acc, input_precision="ieee"))


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def later_kernel(  # type: ignore[no-untyped-def]
    d_theta, starts, from_later, length, chunks, side_stride, PACKED: tl.constexpr, H: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The gradient of a head's angles from later chunks, summed over queries' and keys' sides.

    Grid: heads x sequences; a program holds the sum `[K]` over the chunks seen so far.
    """
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k = tl.arange(0, K)
    acc = tl.zeros((K,), tl.float32)
    for number in range(chunks):
        chunk = chunks - 1 - number
        offs = ((b * chunks + chunk) * H + h) * K + k
        tl.store(from_later + offs, acc)
        _, last = begins(starts, chunk * T, length, PACKED, T)
        own = tl.load(d_theta + offs) + tl.load(d_theta + side_stride + offs)
        acc = tl.where(last < chunk * T, acc, 0.0) + own


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def angles_backward_kernel(  # type: ignore[no-untyped-def]
    angles, dt, starts, from_later, da_sides, ddt_sides, d_angles, d_dt, length, chunks, angles_b,
    angles_l, angles_stride, dt_stride, PACKED: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's angles, summed over a group's heads, and of the heads' dt.

    Grid: chunks x groups x sequences. The contributions of the chunk's own tokens, of both sides,
    and those of later chunks are read once and added; both gradients are written once.
    """
    chunk, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    HEADS: tl.constexpr = H // G
    first = chunk * T
    t = first + tl.arange(0, T)
    _, last = begins(starts, first, length, PACKED, T)
    rate = rates(angles + b * angles_b, angles_l, first, length, K, T)
    dt_t, offs_dt, mask_dt = _steps(dt, b, g, first, length, H, HEADS, T)
    head = g * HEADS + tl.arange(0, HEADS)
    offs_theta = ((b * chunks + chunk) * H + head)[:, None] * K + tl.arange(0, K)[None, :]
    later = tl.load(from_later + offs_theta)
    same = (t >= last)[None, :]
    d_step = tl.sum(later[:, None, :] * rate[None, :, :], 2) * PI
    d_step_all = tl.load(ddt_sides + offs_dt, mask=mask_dt, other=0.0)
    d_step_all += tl.load(ddt_sides + dt_stride + offs_dt, mask=mask_dt, other=0.0)
    tl.store(d_dt + offs_dt, d_step_all + tl.where(same, d_step, 0.0), mask=mask_dt)
    d_turn = tl.sum(later[:, None, :] * tl.where(same, dt_t, 0.0)[:, :, None], 0)
    offs_angles = ((b * G + g) * length + t)[:, None] * K + tl.arange(0, K)[None, :]
    mask = (t < length)[:, None]
    d_turn += tl.load(da_sides + offs_angles, mask=mask, other=0.0)
    d_turn += tl.load(da_sides + angles_stride + offs_angles, mask=mask, other=0.0)
    tl.store(d_angles + offs_angles, (1.0 - rate * rate) * d_turn * PI, mask=mask)
