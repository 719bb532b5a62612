"""Mamba-3's scan with the skip connection, the gate and the sum over ranks, on Hopper.

`forward_triton` has what is computed. Here eight warps walk along a head's chunks, and the next
chunk's rows are copied to shared memory while the products of this one run.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mamba3.tiles_gluon import (
    FLAT,
    MMA,
    PLANE,
    ROWS,
    TILE,
    added,
    angled,
    angles_layout,
    between,
    chunk_vectors,
    columned,
    columns_layout,
    fetch_rows,
    fetched,
    flat,
    gated,
    in_columns,
    make_rows,
    product,
    put_values,
    rates,
    turned,
    vector_of,
    weighed,
    weights_of,
    without,
)


@on_its_device
@gluon.jit  # type: ignore[untyped-decorator]
def forward_sm90_kernel(  # type: ignore[no-untyped-def]
    queries, keys, vectors, rate, theta, starts, x, z, by_head, skip, out, length, chunks, x_b, x_l,
    z_b, z_l, PACKED: gl.constexpr, H: gl.constexpr, G: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    h, b = gl.program_id(0), gl.program_id(1).to(gl.int64)
    kind: gl.constexpr = x.dtype.element_ty
    T: gl.constexpr = ROWS // R
    TH: gl.constexpr = T // 8
    A: gl.constexpr = angles_layout(R)
    C: gl.constexpr = columns_layout(R)
    COLUMN: gl.constexpr = without(C, 0, 2)
    group = b * length * (R * G * 128) + (h // (H // G)) * 128
    queries += group
    keys += group
    x += b * x_b + h * 64
    z += b * z_b + h * 64
    out += (b * length * H + h) * 64
    rate += b * length * 32
    vectors += (b * chunks * H + h) * (8 * T)
    theta += (b * chunks * H + h) * 32
    k_own = gl.arange(0, 32, gl.SliceLayout(0, A))
    q_low = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    q_high = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    k_low = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    k_high = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    fetch_rows(q_low, q_high, queries, 0, length, G, R)
    fetch_rows(k_low, k_high, keys, 0, length, G, R)
    learned = gl.allocate_shared_memory(gl.float32, [R * 512], FLAT)
    biases = learned._reinterpret(gl.float32, [4, R, 128], PLANE)
    weights = learned._reinterpret(gl.float32, [8, 64, R], PLANE)
    LEARNED: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
    by_head += h * (R * 512) + gl.arange(0, R * 512, LEARNED)
    async_copy.async_copy_global_to_shared(learned, by_head)
    async_copy.commit_group()
    shared_vectors = gl.allocate_shared_memory(gl.float32, [8 * T], FLAT)
    at = shared_vectors._reinterpret(gl.float32, [8, TH, 8], PLANE)
    by_token = shared_vectors._reinterpret(gl.float32, [8, T], FLAT)
    direct = gl.load(skip + h)
    speed = rates(rate, 0, length, R)[0]
    x_next, z_next = fetched(x, 0, length, x_l, R), fetched(z, 0, length, z_l, R)
    next_vectors, next_theta = chunk_vectors(vectors, R), gl.load(theta + k_own)
    state, state_plain = gl.zeros([64, 64], gl.float32, MMA), gl.zeros([64, 64], gl.float32, MMA)
    for chunk in tl.range(chunks, disable_licm=True):
        first = chunk * T
        shared_vectors.store(next_vectors)
        x_t, z_t = in_columns(x_next, R).to(gl.float32), in_columns(z_next, R).to(gl.float32)
        step = by_token.index(5).load(gl.SliceLayout(1, A))
        c, s = angled(*turned(speed, step, next_theta, R), R)
        before = gl.allocate_shared_memory(kind, [64, 64], TILE)
        before_plain = gl.allocate_shared_memory(kind, [64, 64], TILE)
        before.store(state.to(kind))
        before_plain.store(state_plain.to(kind))
        v = gl.allocate_shared_memory(kind, [64, ROWS], TILE)
        v_t = x_t * weights_of(weights.index(4), R)
        v.store(flat(v_t, R).to(kind))
        async_copy.wait_group(0)
        gl.thread_barrier()
        q = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
        q_plain = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
        k = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
        k_plain = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
        make_rows(q, q_plain, q_low, q_high, biases.index(0), c, s, R)
        make_rows(k, k_plain, k_low, k_high, biases.index(1), c, s, R)
        weight, _, _ = between(at, starts, first, length, False, PACKED, R)
        hopper.fence_async_shared()
        gl.thread_barrier()
        # What the next chunk needs, or after the last one, its own again.
        more = gl.where(chunk + 1 == chunks, 0, 1)
        following = first + more * T
        fetch_rows(q_low, q_high, queries, following, length, G, R)
        fetch_rows(k_low, k_high, keys, following, length, G, R)
        async_copy.commit_group()
        scores = product(k, q.permute([1, 0]))
        scores = added(k_plain, q_plain.permute([1, 0]), scores)
        y = product(before, q.permute([1, 0]))
        y = added(before_plain, q_plain.permute([1, 0]), y)
        speed = rates(rate, following, length, R)[0]
        x_next, z_next = (
            fetched(x, following, length, x_l, R),
            fetched(z, following, length, z_l, R),
        )
        vectors += more * (H * 8 * T)
        theta += more * (H * 32)
        next_vectors, next_theta = chunk_vectors(vectors, R), gl.load(theta + k_own)
        scores = hopper.warpgroup_mma_wait(1, [scores])
        mixing = gl.allocate_shared_memory(kind, [ROWS, ROWS], TILE)
        mixing.store(weighed(scores, weight, R).to(kind))
        y = hopper.warpgroup_mma_wait(0, [y, before, before_plain, q, q_plain])[0]
        into = gl.expand_dims(gl.expand_dims(vector_of(at, 1, COLUMN), 0), 2)
        y = flat(columned(y, R) * into + direct * v_t, R)
        hopper.fence_async_shared()
        y = added(v, mixing, y)
        left = gl.allocate_shared_memory(kind, [64, ROWS], TILE)
        share = vector_of(at, 2, COLUMN) * vector_of(at, 3, COLUMN)
        left.store(flat(v_t * gl.expand_dims(gl.expand_dims(share, 0), 2), R).to(kind))
        across = gl.expand_dims(gl.expand_dims(vector_of(at, 6, COLUMN), 0), 2)
        state = flat(columned(state, R) * across, R)
        state_plain = flat(columned(state_plain, R) * across, R)
        gate, _ = gated(z_t, weights_of(weights.index(5), R))
        gate = gate * weights_of(weights.index(6), R)
        hopper.fence_async_shared()
        y = hopper.warpgroup_mma_wait(0, [y, v, mixing])[0]
        gl.thread_barrier()
        state = added(left, k, state)
        state_plain = added(left, k_plain, state_plain)
        y = gl.sum(columned(y, R) * gate, 2)
        done = hopper.warpgroup_mma_wait(0, [state, state_plain, left, k, k_plain])
        state, state_plain = done[0], done[1]
        put_values(out, y, first, length, H * 64)
    async_copy.wait_group(0)
