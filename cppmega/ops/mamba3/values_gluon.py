"""The gradients of Mamba-3's values, gates and decays on Hopper, all chunks in parallel.

`values_triton` has what is computed. Here eight warps share a chunk of 64 rows, each with half of
the columns of a product and at most 128 registers, so that a multiprocessor holds sixteen.
"""

from __future__ import annotations

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
    add3,
    added,
    again,
    angled,
    angles_layout,
    between,
    by_rows,
    columned,
    columns_layout,
    fetch_all,
    fetch_flat,
    fetch_rows,
    flat,
    gated,
    in_columns,
    inside,
    make_rows,
    paired,
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
def values_sm90_kernel(  # type: ignore[no-untyped-def]
    queries, keys, vectors, rate, theta, starts, x, z, do, by_head, skip, states, gradients, d_x,
    d_z, d_log_a, d_at_once, d_next, d_skip, sums, length, chunks, x_b, x_l, z_b, z_l,
    PACKED: gl.constexpr, H: gl.constexpr, G: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    h, chunk, b = gl.program_id(0), gl.program_id(1), gl.program_id(2).to(gl.int64)
    kind: gl.constexpr = x.dtype.element_ty
    T: gl.constexpr = ROWS // R
    TH: gl.constexpr = T // 8
    A: gl.constexpr = angles_layout(R)
    C: gl.constexpr = columns_layout(R)
    first = chunk * T
    offs_head, offs_chunk = b * H + h, (b * chunks + chunk) * H + h
    group = b * length * (R * G * 128) + (h // (H // G)) * 128
    offs_h = (b * length * H + h) * 64
    state = gl.allocate_shared_memory(kind, [128, 64], TILE)
    d_state = gl.allocate_shared_memory(kind, [128, 64], TILE)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    hopper.fence_async_shared()
    mbarrier.expect(arrived, 2 * 128 * 64 * 2)
    row = (offs_chunk * 128).to(gl.int32)
    copy_tile_in(states, [row, 0], arrived, state)
    copy_tile_in(gradients, [row, 0], arrived, d_state)
    q_pairs = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    q_others = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    k_pairs = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    k_others = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    learned = gl.allocate_shared_memory(gl.float32, [R * 512], FLAT)
    biases = viewed(learned, gl.float32, [4, R, 128], PLANE)
    weights = viewed(learned, gl.float32, [8, 64, R], PLANE)
    fetch_rows(q_pairs, q_others, queries + group, first, length, G, R)
    fetch_rows(k_pairs, k_others, keys + group, first, length, G, R)
    shared_vectors = gl.allocate_shared_memory(gl.float32, [8 * T], FLAT)
    at = viewed(shared_vectors, gl.float32, [8, TH, 8], PLANE)
    by_token = viewed(shared_vectors, gl.float32, [8, T], FLAT)
    fetch_flat(learned, by_head + h * (R * 512))
    fetch_flat(shared_vectors, vectors + offs_chunk * (8 * T))
    x += b * x_b + h * 64
    z += b * z_b + h * 64
    do += offs_h
    if R > 1:
        x_copied, z_copied, do_copied = fetch_all(x, z, do, first, length, x_l, z_l, H * 64, R)
    async_copy.commit_group()
    speed = rates(rate + b * length * 32, first, length, R)
    theta_own = gl.load(theta + offs_chunk * 32 + gl.arange(0, 32, gl.SliceLayout(0, A)))
    async_copy.wait_group(0)
    barrier()
    c, s = angled(*turned(speed, by_token.index(5).load(gl.SliceLayout(1, A)), theta_own, R), R)
    if R > 1:
        x_t = in_columns(x_copied, R)  # at once, so that its memory is free for the tiles
    q = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    q_plain = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    k = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    k_plain = gl.allocate_shared_memory(kind, [ROWS, 64], TILE)
    make_rows(q, q_plain, q_pairs, q_others, biases.index(0), c, s, R)
    make_rows(k, k_plain, k_pairs, k_others, biases.index(1), c, s, R)
    hopper.fence_async_shared()
    barrier()
    if R == 1:  # four times as many values as of rank 4, in the memory of the copied rows
        x_copied, z_copied, do_copied = fetch_all(x, z, do, first, length, x_l, z_l, H * 64, R)
        async_copy.commit_group()
    scores = product(k, q.permute([1, 0]))
    scores = added(k_plain, q_plain.permute([1, 0]), scores)
    if R == 1:
        async_copy.wait_group(0)
        barrier()
    # The values and the gradients of the output before the gate, with a column for each row.
    z_t = in_columns(z_copied, R)
    do_t = inside(in_columns(do_copied, R), first, length, R)
    dy = gl.allocate_shared_memory(kind, [64, ROWS], TILE)
    if R == 1:
        v = x_copied.permute([1, 0])
    else:
        v = gl.allocate_shared_memory(kind, [64, ROWS], TILE)
        v.store(flat(x_t * weights_of(weights.index(4), R), R).to(kind))
    gate, _ = gated(z_t, weights_of(weights.index(5), R))
    dy.store(flat(do_t * weights_of(weights.index(6), R) * gate, R).to(kind))
    hopper.fence_async_shared()
    products = product(v.permute([1, 0]), dy)
    weight, decay, itself = between(at, starts, first, length, False, PACKED, R)
    scores, products = hopper.warpgroup_mma_wait(0, [scores, products])
    mixing = gl.allocate_shared_memory(kind, [ROWS, ROWS], TILE)
    mixing.store(weighed(scores, weight, R).to(kind))
    mbarrier.wait(arrived, 0, deps=[state, d_state])
    mbarrier.invalidate(arrived)
    y = product(state.slice(0, 64), q.permute([1, 0]))
    y = added(state.slice(64, 64), q_plain.permute([1, 0]), y)
    d_v = product(d_state.slice(0, 64), k.permute([1, 0]))
    d_v = added(d_state.slice(64, 64), k_plain.permute([1, 0]), d_v)
    # The gradients of the weights between tokens; each warp has all of their sums over ranks.
    d_weight = gl.sum(gl.sum(paired(scores * products, R), 4), 1)
    d_own = gl.where(itself, d_weight, 0.0)
    d_weight = d_weight * decay
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    token = first + gl.arange(0, T, ROW)
    into, out_of = by_token.index(1).load(ROW), by_token.index(2).load(ROW)
    later = by_token.index(3).load(ROW)
    d_itself = gl.convert_layout(gl.sum(by_rows(d_own, R), 1), ROW)
    by_row = by_rows(d_weight, R)
    d_later = gl.convert_layout(gl.sum(by_row, 1), ROW)
    by_column = by_rows(gl.permute(d_weight, [2, 3, 0, 1]), R)
    later_column = by_token.index(3).load(gl.SliceLayout(0, by_column.type.layout))
    d_since = gl.sum(by_column * gl.expand_dims(later_column, 0), 1)
    d_since = gl.convert_layout(d_since, ROW) - later * d_later
    # What crosses the chunk's boundaries.
    STATE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    d_across = gl.sum(
        gl.sum(state.load(STATE).to(gl.float32) * d_state.load(STATE).to(gl.float32), 1), 0
    )
    COLUMN: gl.constexpr = without(C, 0, 2)
    into_column = gl.expand_dims(gl.expand_dims(vector_of(at, 1, COLUMN), 0), 2)
    share = vector_of(at, 2, COLUMN) * vector_of(at, 3, COLUMN)
    share = gl.expand_dims(gl.expand_dims(share, 0), 2)
    # The operands too, whose memory could be taken for others as long as the products run.
    done = hopper.warpgroup_mma_wait(0, [y, d_v, state, d_state, q, q_plain, k, k_plain])
    y, d_v = done[0], done[1]
    y, d_v = columned(y, R), columned(d_v, R)
    v_t = columned(v.load(MMA).to(gl.float32), R)
    dy_t = columned(dy.load(MMA).to(gl.float32), R)
    whole, part_y, part_v = dy_t * v_t, dy_t * y, v_t * d_v
    whole, part_y, part_v = gl.reduce((whole, part_y, part_v), 2, add3)
    whole, part_y, part_v = gl.reduce((whole, part_y, part_v), 0, add3)
    d_direct = gl.convert_layout(gl.reshape(whole, [T]), ROW)
    d_since += into * gl.convert_layout(gl.reshape(part_y, [T]), ROW)
    d_share = out_of * gl.convert_layout(gl.reshape(part_v, [T]), ROW)
    d_later += d_share
    d_whole = later * d_share
    d_since -= d_whole
    d_log = gl.associative_scan(d_since + d_whole, 0, add, reverse=True)
    d_log += gl.associative_scan(d_whole, 0, add) - d_whole
    d_log += d_across * by_token.index(6).load(ROW)
    mask = token < length
    offs = offs_head * length + token
    gl.store(d_skip + offs, d_direct, mask=mask)
    gl.store(d_log_a + offs, d_log, mask=mask)
    gl.store(d_at_once + offs, d_itself + d_later, mask=mask)
    gl.store(d_next + offs, d_later, mask=mask)
    hopper.fence_async_shared()
    S: gl.constexpr = without(C, 1, 3)
    p_sums = sums + offs_chunk * (3 * R * 64)
    p_sums += gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, S)), 1) * R
    p_sums += gl.expand_dims(gl.arange(0, R, gl.SliceLayout(0, S)), 0)
    direct = gl.load(skip + h)
    w_x, w_z = weights_of(weights.index(4), R), weights_of(weights.index(5), R)
    w_out = weights_of(weights.index(6), R)
    y = added(v, mixing, flat(y * into_column, R))
    y = hopper.warpgroup_mma_wait(0, [y, v, mixing])[0]
    if R == 1:  # read again instead of held in registers
        x_t, z_t = in_columns(x_copied, R), in_columns(z_copied, R)
        do_t = inside(in_columns(do_copied, R), first, length, R)
    else:
        x_t, z_t, do_t = again(x_t), again(z_t), again(do_t)
    gate, slope = gated(z_t, w_z)
    d_gated = do_t * (columned(y, R) + direct * (x_t * w_x))
    d_z_t = d_gated * slope * w_out
    if R > 1:
        sum_out, sum_z = gl.reduce((d_gated * gate, d_z_t * z_t), 3, add2)
        sum_out, sum_z = gl.reduce((sum_out, sum_z), 1, add2)
        gl.store(p_sums, sum_out)
        gl.store(p_sums + R * 64, sum_z)
    put_values(d_z + offs_h, gl.sum(d_z_t * w_z, 2), first, length, H * 64)
    d_v = added(dy, mixing.permute([1, 0]), flat(d_v * share, R))
    d_v = hopper.warpgroup_mma_wait(0, [d_v, dy, mixing])[0]
    d_v = columned(d_v, R) + direct * (do_t * w_out * gate)
    if R > 1:
        gl.store(p_sums + 2 * R * 64, gl.sum(gl.sum(d_v * x_t, 3), 1))
    put_values(d_x + offs_h, gl.sum(d_v * w_x, 2), first, length, H * 64)
