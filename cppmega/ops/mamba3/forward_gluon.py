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
from cppmega.ops.mamba3.names_gluon import barrier, viewed
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
    columned,
    columns_layout,
    fetch_flat,
    fetch_rates,
    fetch_rows,
    fetch_values,
    flat,
    gated,
    in_columns,
    make_rows,
    product,
    put_values,
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
    q_pairs = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    q_others = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    k_pairs = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    k_others = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    fetch_rows(q_pairs, q_others, queries, 0, length, G, R)
    fetch_rows(k_pairs, k_others, keys, 0, length, G, R)
    learned = gl.allocate_shared_memory(gl.float32, [R * 512], FLAT)
    biases = viewed(learned, gl.float32, [4, R, 128], PLANE)
    weights = viewed(learned, gl.float32, [8, 64, R], PLANE)
    copied = viewed(
        gl.allocate_shared_memory(gl.float32, [16 * T], FLAT), gl.float32, [2, 8 * T], FLAT
    )
    x_copied = gl.allocate_shared_memory(kind, [T, 64], TILE)
    z_copied = gl.allocate_shared_memory(kind, [T, 64], TILE)
    speed = gl.allocate_shared_memory(gl.float32, [T, 32], PLANE)
    theta_copied = gl.allocate_shared_memory(gl.float32, [32], FLAT)
    fetch_flat(learned, by_head + h * (R * 512))
    fetch_flat(copied.index(0), vectors)
    fetch_flat(theta_copied, theta)
    fetch_rates(speed, rate, 0, length, R)
    fetch_values(x_copied, x, 0, length, x_l, R)
    fetch_values(z_copied, z, 0, length, z_l, R)
    async_copy.commit_group()
    direct = gl.load(skip + h)
    state, state_plain = gl.zeros([64, 64], gl.float32, MMA), gl.zeros([64, 64], gl.float32, MMA)
    for chunk in tl.range(chunks, disable_licm=True):
        first = chunk * T
        async_copy.wait_group(0)
        barrier()
        at = viewed(copied.index(chunk & 1), gl.float32, [8, TH, 8], PLANE)
        by_token = viewed(copied.index(chunk & 1), gl.float32, [8, T], FLAT)
        x_t, z_t = in_columns(x_copied, R), in_columns(z_copied, R)
        step = by_token.index(5).load(gl.SliceLayout(1, A))
        angle = theta_copied.load(gl.SliceLayout(0, A))
        c, s = angled(*turned(speed.load(A), step, angle, R), R)
        before = gl.allocate_shared_memory(kind, [64, 64], TILE)
        before_plain = gl.allocate_shared_memory(kind, [64, 64], TILE)
        before.store(state.to(kind))
        before_plain.store(state_plain.to(kind))
        v_t = x_t * weights_of(weights.index(4), R)
        if R > 1:
            v = gl.allocate_shared_memory(kind, [64, ROWS], TILE)
            v.store(flat(v_t, R).to(kind))
        q = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
        q_plain = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
        k = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
        k_plain = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
        make_rows(q, q_plain, q_pairs, q_others, biases.index(0), c, s, R)
        make_rows(k, k_plain, k_pairs, k_others, biases.index(1), c, s, R)
        weight, _, _ = between(at, starts, first, length, False, PACKED, R)
        hopper.fence_async_shared()
        barrier()
        # What the next chunk needs, or after the last one, its own again.
        more = gl.where(chunk + 1 == chunks, 0, 1)
        following = first + more * T
        fetch_rows(q_pairs, q_others, queries, following, length, G, R)
        fetch_rows(k_pairs, k_others, keys, following, length, G, R)
        vectors += more * (H * 8 * T)
        theta += more * (H * 32)
        fetch_flat(copied.index((chunk + 1) & 1), vectors)
        fetch_flat(theta_copied, theta)
        fetch_rates(speed, rate, following, length, R)
        fetch_values(x_copied, x, following, length, x_l, R)
        fetch_values(z_copied, z, following, length, z_l, R)
        async_copy.commit_group()
        scores = product(k, q.permute([1, 0]))
        scores = added(k_plain, q_plain.permute([1, 0]), scores)
        y = product(before, q.permute([1, 0]))
        y = added(before_plain, q_plain.permute([1, 0]), y)
        if R == 4:
            scores = hopper.warpgroup_mma_wait(1, [scores])
        else:  # so that what follows takes the memory of the queries, and two programs fit
            done = hopper.warpgroup_mma_wait(0, [scores, y, before, before_plain, q, q_plain])
            scores, y = done[0], done[1]
        if R == 1:
            v = gl.allocate_shared_memory(kind, [64, ROWS], TILE)
            v.store(flat(v_t, R).to(kind))
        mixing = gl.allocate_shared_memory(kind, [ROWS, ROWS], TILE)
        mixing.store(weighed(scores, weight, R).to(kind))
        if R == 4:
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
        barrier()
        state = added(left, k, state)
        state_plain = added(left, k_plain, state_plain)
        y = gl.sum(columned(y, R) * gate, 2)
        done = hopper.warpgroup_mma_wait(0, [state, state_plain, left, k, k_plain])
        state, state_plain = done[0], done[1]
        put_values(out, y, first, length, H * 64)
    async_copy.wait_group(0)
