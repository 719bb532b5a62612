"""What Mamba-3's backward needs to know of every token and head besides its tiles; memory-bound.

Grid: blocks of chunks x heads x sequences. Reads log a, dt and the trapezoid's share once, and
writes eight fp32 values per token, padded to whole chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mamba3.tiles_triton import sigmoid

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1e30)
"""A logarithm whose exponential is zero, and whose difference from itself is too."""


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def vectors_kernel(  # type: ignore[no-untyped-def]
    log_a, dt, trap, starts, vectors, length, chunks, PACKED: tl.constexpr, H: tl.constexpr,
    T: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Of each chunk and head `[8, T]`: the decay's logarithm to base 2 since the chunk began; the
    decays from the state before the chunk to a token and from it to the state after the chunk; its
    weights in later tokens' outputs and in its own; dt; the decay across the chunk; and nothing.
    """
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    first = (chunk * T)[:, None]
    t = first + tl.arange(0, T)[None, :]
    here = t < length
    at = (b * H + h) * length + t
    log = tl.load(log_a + at, mask=here, other=0.0) * LOG2E
    step = tl.load(dt + at, mask=here, other=0.0)
    share = sigmoid(tl.load(trap + at, mask=here, other=0.0).to(tl.float32))
    after = tl.load(dt + at + 1, mask=t + 1 < length, other=0.0)
    share_after = sigmoid(tl.load(trap + at + 1, mask=t + 1 < length, other=0.0).to(tl.float32))
    since = tl.cumsum(log, 1)
    total = tl.sum(log, 1)
    into = tl.exp2(since)
    out_of = tl.exp2(tl.minimum(total[:, None] - since, 0.0))
    whole = tl.exp2(total)
    if PACKED:
        begin = tl.load(starts + tl.minimum(t, length - 1))
        last = tl.max(begin, 1)
        into = tl.where(begin < first, into, 0.0)
        out_of = tl.where(t >= last[:, None], out_of, 0.0)
        whole = tl.where(last < chunk * T, whole, 0.0)
    at_once = tl.where(here, share * step, 0.0)
    later = tl.where(here, at_once + (1.0 - share_after) * after, 0.0)
    at = ((b * chunks + chunk) * H + h)[:, None] * (8 * T) + tl.arange(0, T)[None, :]
    inside = (chunk < chunks)[:, None]
    tl.store(vectors + at, tl.where(here, since, NEVER), mask=inside)
    tl.store(vectors + at + T, tl.where(here, into, 0.0), mask=inside)
    tl.store(vectors + at + 2 * T, tl.where(here, out_of, 0.0), mask=inside)
    tl.store(vectors + at + 3 * T, later, mask=inside)
    tl.store(vectors + at + 4 * T, at_once, mask=inside)
    tl.store(vectors + at + 5 * T, step, mask=inside)
    tl.store(vectors + at + 6 * T, tl.zeros_like(step) + whole[:, None], mask=inside)
