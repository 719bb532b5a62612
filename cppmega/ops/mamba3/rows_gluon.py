"""The gradients of Mamba-3's queries and keys, and of their angles, on Hopper.

`rows_triton` has what is computed, for queries and keys in one launch each. Here one program does
both, so that what they share is made once: eight warps accumulate dQ and dK of a chunk of 64 rows
over the heads of a group, 64 registers of each thread, while the next head's states are copied.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.mamba3.names_gluon import barrier, copy_tile_in, viewed
from cppmega.ops.mamba3.tiles_gluon import (
    FLAT,
    MMA,
    PLANE,
    ROWS,
    TILE,
    add,
    add2,
    added,
    angled,
    angles_layout,
    between,
    columned,
    columns_layout,
    fetch_columns,
    fetch_flat,
    fetch_rates,
    fetch_rows,
    fetch_values,
    flat,
    gated,
    half_layout,
    halves,
    in_columns,
    inside,
    make_rows,
    pair_bias,
    pairs_of,
    product,
    turned,
    vector_of,
    weighed,
    weights_of,
    without,
)

PI = gl.constexpr(3.141592653589793)


@gluon.jit  # type: ignore[untyped-decorator]
def _either(value, ends, value_before, ends_before):  # type: ignore[no-untyped-def]
    """Sums towards earlier tokens that begin anew where a document ends."""
    return gl.where(ends_before, value_before, value + value_before), ends | ends_before


@gluon.jit  # type: ignore[untyped-decorator]
def _put_sum(sums, x, column, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store `[columns, R]` sums over tokens."""
    r = gl.arange(0, R, gl.SliceLayout(0, x.type.layout))
    gl.store(sums + gl.expand_dims(column, 1) * R + gl.expand_dims(r, 0), x)


@gluon.jit  # type: ignore[untyped-decorator]
def _put(d_rows, tile, offset, first, length, G: gl.constexpr, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store 32 columns from the offset, or the 64 that are not rotated, of a group's rows."""
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0])
    TH: gl.constexpr = ROWS // R // 8
    N: gl.constexpr = tile.shape[0]
    tile = gl.permute(gl.reshape(tile, [N, TH, R, 8]), [1, 2, 3, 0]).to(d_rows.dtype.element_ty)
    tile = gl.convert_layout(gl.reshape(tile, [ROWS, N]), OUT)
    m = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    t, r = first + m // (8 * R) * 8 + m % 8, m // 8 % R
    n = gl.arange(0, N, gl.SliceLayout(0, OUT))
    n = n + offset + gl.where(n >= 32, 32, 0)
    ptrs = d_rows + gl.expand_dims(t * (R * G * 128) + r * (G * 128), 1) + gl.expand_dims(n, 0)
    gl.store(ptrs, tile, mask=gl.expand_dims(t < length, 1))


@on_its_device
@gluon.jit  # type: ignore[untyped-decorator]
def rows_sm90_kernel(  # type: ignore[no-untyped-def]
    queries, keys, vectors, rate, theta, starts, x, z, do, by_head, states, d_rows, d_dt, d_angles,
    d_theta, sums, length, chunks, x_b, x_l, z_b, z_l, KEYS: gl.constexpr, PACKED: gl.constexpr,
    H: gl.constexpr, G: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    chunk, g, b = gl.program_id(0), gl.program_id(1), gl.program_id(2).to(gl.int64)
    kind: gl.constexpr = x.dtype.element_ty
    HEADS: gl.constexpr = H // G
    T: gl.constexpr = ROWS // R
    TH: gl.constexpr = T // 8
    A: gl.constexpr = angles_layout(R)
    C: gl.constexpr = columns_layout(R)
    HALF: gl.constexpr = half_layout(R)
    first = chunk * T
    group = b * length * (R * G * 128) + g * 128
    offs_chunk = (b * chunks + chunk) * H + g * HEADS
    offs_head = b * H + g * HEADS
    # What is copied: a head's states and parameters, and, once, the rows of the group.
    state = gl.allocate_shared_memory(kind, [128, 64], TILE)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    hopper.fence_async_shared()
    mbarrier.expect(arrived, 128 * 64 * 2)
    copy_tile_in(states, [(offs_chunk * 128).to(gl.int32), 0], arrived, state)
    pairs = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    plain = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    own_pairs = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    fetch_rows(pairs, plain, (queries if KEYS else keys) + group, first, length, G, R)
    fetch_columns(own_pairs, (keys if KEYS else queries) + group, 0, 64, first, length, G, R)
    learned = viewed(
        gl.allocate_shared_memory(gl.float32, [R * 1024], FLAT), gl.float32, [2, R * 512], FLAT
    )
    copied = viewed(
        gl.allocate_shared_memory(gl.float32, [16 * T], FLAT), gl.float32, [2, 8 * T], FLAT
    )
    x_copied = gl.allocate_shared_memory(kind, [T, 64], TILE)
    z_copied = gl.allocate_shared_memory(kind, [T, 64], TILE)
    do_copied = gl.allocate_shared_memory(kind, [T, 64], TILE)
    theta_copied = gl.allocate_shared_memory(gl.float32, [32], FLAT)
    speed = gl.allocate_shared_memory(gl.float32, [T, 32], PLANE)
    fetch_rates(speed, rate + b * length * 32, first, length, R)
    x += b * x_b + g * (HEADS * 64)
    z += b * z_b + g * (HEADS * 64)
    do += (b * length * H + g * HEADS) * 64
    by_head += g * HEADS * (R * 512)
    vectors += offs_chunk * (8 * T)
    theta += offs_chunk * 32
    fetch_flat(learned.index(0), by_head)
    fetch_flat(copied.index(0), vectors)
    fetch_flat(theta_copied, theta)
    fetch_values(x_copied, x, first, length, x_l, R)
    fetch_values(z_copied, z, first, length, z_l, R)
    fetch_values(do_copied, do, first, length, H * 64, R)
    async_copy.commit_group()
    other = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    other_plain = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    acc_one = gl.zeros([32, TH, R, 8], gl.float32, HALF)
    acc_other = gl.zeros([32, TH, R, 8], gl.float32, HALF)
    acc_plain = gl.zeros([64, 64], gl.float32, MMA)
    d_turn = gl.zeros([T, 32], gl.float32, A)
    t_own = first + gl.arange(0, T, gl.SliceLayout(1, A))
    k_own = gl.arange(0, 32, gl.SliceLayout(0, A))
    at_row = (gl.expand_dims(t_own, 1) == first) & (gl.full([T, 32], 0, gl.int32, A) == 0)
    begin = gl.zeros([T], gl.int32, gl.SliceLayout(1, A))
    if PACKED:
        begin = gl.load(starts + gl.minimum(t_own, length - 1))
        following = gl.load(starts + gl.minimum(t_own + 1, length - 1))
        ends = gl.expand_dims(following == t_own + 1, 1) & (gl.full([T, 32], 0, gl.int32, A) == 0)
    earlier = gl.expand_dims(begin < first, 1)
    for head in tl.range(HEADS, disable_licm=True):
        async_copy.wait_group(0)
        barrier()
        at = viewed(copied.index(head & 1), gl.float32, [8, TH, 8], PLANE)
        by_token = viewed(copied.index(head & 1), gl.float32, [8, T], FLAT)
        biases = viewed(learned.index(head & 1), gl.float32, [4, R, 128], PLANE)
        weights = viewed(learned.index(head & 1), gl.float32, [8, 64, R], PLANE)
        step = by_token.index(5).load(gl.SliceLayout(1, A))
        angle = theta_copied.load(gl.SliceLayout(0, A))
        cos, sin = turned(speed.load(A), step, angle, R)
        c, s = angled(cos, sin, R)
        make_rows(other, other_plain, pairs, plain, biases.index(0 if KEYS else 1), c, s, R)
        COLUMN: gl.constexpr = without(C, 0, 2)
        share = vector_of(at, 1, COLUMN)
        if KEYS:
            share = vector_of(at, 2, COLUMN) * vector_of(at, 3, COLUMN)
        share = gl.expand_dims(gl.expand_dims(share, 0), 2)
        z_t = in_columns(z_copied, R)
        do_t = inside(in_columns(do_copied, R), first, length, R)
        gate, _ = gated(z_t, weights_of(weights.index(5), R))
        dy_t = do_t * weights_of(weights.index(6), R) * gate
        dy = gl.allocate_shared_memory(kind, [64, ROWS], TILE)
        left = gl.allocate_shared_memory(kind, [64, ROWS], TILE)
        dy.store(flat(dy_t, R).to(kind))
        v_t = in_columns(x_copied, R) * weights_of(weights.index(4), R)
        if R == 1:
            v = x_copied.permute([1, 0])
        else:
            v = gl.allocate_shared_memory(kind, [64, ROWS], TILE)
            v.store(flat(v_t, R).to(kind))
        left.store(flat((v_t if KEYS else dy_t) * share, R).to(kind))
        weight, _, _ = between(at, starts, first, length, KEYS, PACKED, R)
        hopper.fence_async_shared()
        barrier()
        # Copies for the next head; for the last one, its own again.
        after = gl.where(head + 1 == HEADS, 0, 1)
        by_head += after * (R * 512)
        x += after * 64
        z += after * 64
        do += after * 64
        vectors += after * (8 * T)
        theta += after * 32
        fetch_flat(learned.index((head + 1) & 1), by_head)
        fetch_flat(copied.index((head + 1) & 1), vectors)
        fetch_flat(theta_copied, theta)
        if R > 1:
            fetch_values(x_copied, x, first, length, x_l, R)
        fetch_values(z_copied, z, first, length, z_l, R)
        fetch_values(do_copied, do, first, length, H * 64, R)
        async_copy.commit_group()
        products = product(dy.permute([1, 0]), v) if KEYS else product(v.permute([1, 0]), dy)
        mbarrier.wait(arrived, head & 1, deps=[state])
        d_tile = product(state.slice(0, 64).permute([1, 0]), left)
        if R > 1:
            d_plain = product(state.slice(64, 64).permute([1, 0]), left)
        products = hopper.warpgroup_mma_wait(1 if R == 1 else 2, [products, v, dy])[0]
        d_scores = gl.allocate_shared_memory(kind, [ROWS, ROWS], TILE)
        d_scores.store(weighed(products, weight, R).to(kind))
        hopper.fence_async_shared()
        d_tile = added(other.permute([1, 0]), d_scores, d_tile)
        if R == 1:
            d_plain = product(state.slice(64, 64).permute([1, 0]), left)
        d_plain = added(other_plain.permute([1, 0]), d_scores, d_plain)
        p_sums = sums + (offs_chunk + head) * (R * 128)
        # The operands too, whose memory could be taken for others as long as the products run.
        done = hopper.warpgroup_mma_wait(0, [d_tile, d_plain, left, d_scores])
        d_tile, d_plain = done[0], done[1]
        barrier()
        if R == 1:  # now that no product reads the values any more
            fetch_values(x_copied, x, first, length, x_l, R)
            async_copy.commit_group()
        if head + 1 < HEADS:
            row = ((offs_chunk + head + 1) * 128).to(gl.int32)
            mbarrier.expect(arrived, 128 * 64 * 2)
            copy_tile_in(states, [row, 0], arrived, state)
        N2: gl.constexpr = without(C, 1, 3)
        n = gl.arange(0, 64, gl.SliceLayout(1, N2))
        plain_sum = gl.sum(gl.sum(columned(d_plain, R), 3), 1)
        _put_sum(p_sums, plain_sum, n + 32 + gl.where(n >= 32, 32, 0), R)
        acc_plain += d_plain
        L: gl.constexpr = without(HALF, 2)
        c = gl.convert_layout(gl.permute(gl.reshape(cos, [TH, 8, 32]), [2, 0, 1]), L)
        s = gl.convert_layout(gl.permute(gl.reshape(sin, [TH, 8, 32]), [2, 0, 1]), L)
        c, s = gl.expand_dims(c, 2), gl.expand_dims(s, 2)
        d_one, d_other = halves(d_tile, R)
        d_first = d_one * c + d_other * s
        d_second = d_other * c - d_one * s
        one_own, other_own = pairs_of(own_pairs, R)
        own_bias = biases.index(1 if KEYS else 0)
        one_own += pair_bias(own_bias, 0, R)
        other_own += pair_bias(own_bias, 64, R)
        # The angle's gradient is the same before the rotation as after it.
        d_angle = gl.sum(one_own * d_second - other_own * d_first, 2)
        K2: gl.constexpr = without(HALF, 1, 3)
        k = gl.arange(0, 32, gl.SliceLayout(1, K2))
        first_sum, second_sum = gl.reduce((d_first, d_second), 3, add2)
        first_sum, second_sum = gl.reduce((first_sum, second_sum), 1, add2)
        _put_sum(p_sums, first_sum, k, R)
        _put_sum(p_sums, second_sum, k + 64, R)
        acc_one += d_first
        acc_other += d_second
        d_angle = gl.reshape(gl.permute(d_angle, [1, 2, 0]), [T, 32])
        from_here = gl.convert_layout(d_angle, A)
        if PACKED:
            from_here, _ = gl.associative_scan((from_here, ends), 0, _either, reverse=True)
        else:
            from_here = gl.associative_scan(from_here, 0, add, reverse=True)
        d_step = gl.sum(from_here * speed.load(A), 1) * PI
        gl.store(d_dt + (offs_head + head) * length + t_own, d_step, mask=t_own < length)
        d_turn += from_here * gl.expand_dims(step, 1)
        k_ptrs = d_theta + (offs_chunk + head) * 32 + gl.expand_dims(k_own, 0)
        k_ptrs += gl.expand_dims(t_own * 0, 1)
        gl.store(k_ptrs, gl.where(earlier, from_here, 0.0), mask=at_row)
    async_copy.wait_group(0)
    mbarrier.invalidate(arrived)
    _put(d_rows + group, acc_one, 0, first, length, G, R)
    _put(d_rows + group, acc_other, 64, first, length, G, R)
    _put(d_rows + group, acc_plain, 32, first, length, G, R)
    ptrs = d_angles + (b * G + g) * length * 32 + gl.expand_dims(t_own, 1) * 32
    gl.store(ptrs + gl.expand_dims(k_own, 0), d_turn, mask=gl.expand_dims(t_own < length, 1))
