"""Device functions and layouts of Mamba-3's scan for Hopper, in Gluon.

A chunk has T tokens and R * T = 64 rows; its row `(t // 8, r, t % 8)` is rank r of token t. With
eight warps, a product of 64 x 64 leaves each thread the values of two tokens in all their ranks,
and those of both elements of a pair: sums over ranks, rotations and the weights between tokens
need no other thread. States have 128 columns, in two tiles of 64 as in `tiles_triton`; heads have
64 values.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cppmega.ops.mamba3.names_gluon import copy_in

ROWS = gl.constexpr(64)
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
"""Of products of 64 x 64: four warps by rows, two groups of them by columns."""
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLANE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
"""Of fp32 values in shared memory, one after the other."""
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
"""Of copies of tiles of 64 x 64: 16 bytes of each thread."""
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Of operands of 64 x 64."""


def descriptor(states: Any) -> TensorDescriptor:
    """Of states `[chunks, 128, 64]`, the rotated tile before the other."""
    return TensorDescriptor.from_tensor(states, [128, 64], TILE.value)


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _layout(R: int, axes: str, regs: str, lanes: str, warps: str) -> Any:
    """Where threads hold the values of a tensor.

    Args:
        R: ranks.
        axes: letters of its axes: m and n number the rows of a chunk and become three axes,
            `(t // 8, r, t % 8)`; k numbers 32 pairs, p and c 64 values or columns, r ranks, t
            tokens, and - is a chunk's rows in one axis.
        regs: what a thread's registers hold, as letters with bits of their numbers.
        lanes: the same of a warp's threads.
        warps: the same of the warps; a dot where all hold the same.
    """
    ranks = R.bit_length() - 1
    shape: list[int] = []
    starts: dict[str, int] = {}
    for axis in axes:
        starts[axis] = len(shape)
        sizes = {"k": [32], "p": [64], "c": [64], "-": [64], "r": [R], "t": [64 // R]}
        shape += sizes.get(axis, [64 // R // 8, R, 8])
    parts = []
    for codes in (regs, lanes, warps):
        bases = []
        for code in codes.split():
            basis = [0] * len(shape)
            if code != ".":
                axis, bit = code[0], int(code[1:])
                at = starts[axis]
                if axis in "mn":
                    at += 2 if bit < 3 else 1 if bit < 3 + ranks else 0
                    bit -= 0 if bit < 3 else 3 if bit < 3 + ranks else 3 + ranks
                basis[at] = 1 << bit
            bases.append(basis)
        parts.append(bases)
    return gl.DistributedLinearLayout(*parts, [], shape)


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def pairs_layout(R: int) -> Any:
    """Of a product of rows by rows, `[T / 8, R, 8, T / 8, R, 8]`."""
    return _layout(R, "mn", "n0 m3 n3 n4", "n1 n2 m0 m1 m2", "m4 m5 n5")


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def columns_layout(R: int) -> Any:
    """Of a product whose columns are rows of a chunk, `[64, T / 8, R, 8]`."""
    return _layout(R, "pm", "m0 p3 m3 m4", "m1 m2 p0 p1 p2", "p4 p5 m5")


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def tokens_layout(R: int) -> Any:
    """Of a head's values, `[64, T]`, as a product's columns need them."""
    regs, last = {4: ("", 3), 2: ("t3", 4), 1: ("t3 t4", 5)}[R]
    return _layout(R, "pt", f"t0 p3 {regs}", "t1 t2 p0 p1 p2", f"p4 p5 t{last}")


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def half_layout(R: int) -> Any:
    """Of one element of each pair in a product whose columns are rows, `[32, T / 8, R, 8]`."""
    return _layout(R, "km", "m0 m3 m4", "m1 m2 k0 k1 k2", "k3 k4 m5")


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def raw_half_layout(R: int) -> Any:
    """Of the pairs of a chunk's rows, transposed, `[64, 64]`: for either half that of halves."""
    return _layout(R, "c-", "c5 -0 -3 -4", "-1 -2 c0 c1 c2", "c3 c4 -5")


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def rotation_layout(R: int) -> Any:
    """Of a quarter of the columns of a chunk's rows, `[T / 8, R, 8, 32]`."""
    return _layout(R, "mk", "k0 k1 m3", "k2 k3 k4 m0 m2", "m1 m4 m5")


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def raw_layout(R: int) -> Any:
    """Of half of the columns, `[64, 64]`: for each quarter that of rotations."""
    return _layout(R, "-c", "c0 c1 -3 c5", "c2 c3 c4 -0 -2", "-1 -4 -5")


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def ranks_layout(R: int) -> Any:
    """Of a head's weights of all ranks, `[64, R]`, as a product's columns need them."""
    ranks = {4: "r0 r1", 2: "r0", 1: ""}[R]
    return _layout(R, "pr", f"{ranks} p3", ". . p0 p1 p2", "p4 p5 .")


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def angles_layout(R: int) -> Any:
    """Of a chunk's angles `[T, 32]`: all tokens of a column in one warp."""
    if R == 4:
        return gl.BlockedLayout([1, 2], [16, 2], [1, 8], [1, 0])
    return gl.BlockedLayout([1, 4], [32, 1], [1, 8], [1, 0])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def without(layout: Any, *axes: int) -> Any:
    """The layout of what is the same along these axes."""
    for axis in sorted(axes, reverse=True):
        layout = gl.SliceLayout(axis, layout)
    return layout


@gluon.jit  # type: ignore[untyped-decorator]
def add(a, b):  # type: ignore[no-untyped-def]
    return a + b


@gluon.jit  # type: ignore[untyped-decorator]
def add2(a, b, c, d):  # type: ignore[no-untyped-def]
    return a + c, b + d


@gluon.jit  # type: ignore[untyped-decorator]
def add3(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    return a + d, b + e, c + f


@gluon.jit  # type: ignore[untyped-decorator]
def sine(turn):  # type: ignore[no-untyped-def]
    """As in `tiles_triton`."""
    square = turn * turn
    poly = 39.71090849 * square - 76.57499094
    poly = poly * square + 81.60223119
    poly = poly * square - 41.34167748
    return (poly * square + 6.283185274) * turn


@gluon.jit  # type: ignore[untyped-decorator]
def fraction(turns):  # type: ignore[no-untyped-def]
    return turns - gl.floor(turns + 0.5)


@gluon.jit  # type: ignore[untyped-decorator]
def gated(z, weight):  # type: ignore[no-untyped-def]
    """SiLU of z times a rank's weight, and its derivative, as in `tiles_triton`."""
    gate = z * weight
    root = gl.rsqrt(1.0 + gl.exp2(gate * -1.4426950408889634))
    share = root * root
    return gate * share, share * (1.0 + gate * (1.0 - share))


@gluon.jit  # type: ignore[untyped-decorator]
def turned(rate, step, theta, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """Cosine and sine `[T, 32]` of a head's angles, in the layout of angles.

    Args:
        rate: of the tokens, `[T, 32]`.
        step: dt of the tokens, `[T]`.
        theta: `[32]`, before the chunk.
        R: ranks.
    """
    turns = gl.associative_scan(rate * gl.expand_dims(step * 0.5, 1), 0, add)
    turns = turns + gl.expand_dims(theta, 0)
    return sine(0.25 - gl.abs(fraction(turns))), sine(0.25 - gl.abs(fraction(turns - 0.25)))


@gluon.jit  # type: ignore[untyped-decorator]
def rates(rate, first, length, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """A chunk's rates `[T, 32]` of a sequence's; after its end, those of the last token."""
    L: gl.constexpr = angles_layout(R)
    t = gl.minimum(first + gl.arange(0, ROWS // R, gl.SliceLayout(1, L)), length - 1)
    k = gl.arange(0, 32, gl.SliceLayout(0, L))
    return gl.load(rate + (gl.expand_dims(t, 1) * 32 + gl.expand_dims(k, 0)))


@gluon.jit  # type: ignore[untyped-decorator]
def fetch_columns(tile, x, start, apart, first, length, G: gl.constexpr, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin to copy 64 columns of a chunk's keys or queries to shared memory: 32 from the start,
    and 32 that come so far after these."""
    m = gl.arange(0, ROWS, gl.SliceLayout(1, COPIED))
    t = gl.minimum(first + m // (8 * R) * 8 + m % 8, length - 1)
    n = gl.arange(0, 64, gl.SliceLayout(0, COPIED))
    n = start + n % 32 + n // 32 * apart
    ptrs = x + gl.expand_dims(t * (R * G * 128) + m // 8 % R * (G * 128), 1)
    copy_in(tile, ptrs + gl.expand_dims(n, 0))


@gluon.jit  # type: ignore[untyped-decorator]
def fetch_rows(pairs, plain, x, first, length, G: gl.constexpr, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin to copy both elements of the pairs of a chunk's rows, and their other columns."""
    fetch_columns(pairs, x, 0, 64, first, length, G, R)
    fetch_columns(plain, x, 32, 64, first, length, G, R)


@gluon.jit  # type: ignore[untyped-decorator]
def _quarters(tile, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """Two times `[T / 8, R, 8, 32]` of `[64, 64]` in shared memory, in fp32."""
    L: gl.constexpr = rotation_layout(R)
    x = gl.reshape(tile.load(raw_layout(R)), [ROWS // R // 8, R, 8, 2, 32])
    one, other = gl.split(gl.permute(x, [0, 1, 2, 4, 3]))
    return (
        gl.convert_layout(one, L, assert_trivial=True).to(gl.float32),
        gl.convert_layout(other, L, assert_trivial=True).to(gl.float32),
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _bias_of(bias, start: gl.constexpr, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """`[1, R, 1, 32]` of a head's bias in shared memory, `[R, 128]`."""
    x = bias.slice(start, 32, 1).load(without(rotation_layout(R), 0, 2))
    return gl.expand_dims(gl.expand_dims(x, 0), 2)


@gluon.jit  # type: ignore[untyped-decorator]
def make_turned(tile, pairs, bias, c, s, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store a rotated tile to shared memory, in the type of the tile, from the copied pairs."""
    kind: gl.constexpr = tile.dtype
    one, other = _quarters(pairs, R)
    one, other = one + _bias_of(bias, 0, R), other + _bias_of(bias, 64, R)
    both = gl.join((one * c - other * s).to(kind), (one * s + other * c).to(kind))
    both = gl.permute(gl.reshape(both, [ROWS // R // 8, R, 8, 4, 8, 2]), [0, 1, 2, 3, 5, 4])
    tile.store(gl.reshape(both, [ROWS, 64]))


@gluon.jit  # type: ignore[untyped-decorator]
def make_rows(turned_tile, plain_tile, pairs, plain, bias, c, s, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """The same, with the tile of the other columns."""
    kind: gl.constexpr = plain_tile.dtype
    make_turned(turned_tile, pairs, bias, c, s, R)
    first, second = _quarters(plain, R)
    first, second = first + _bias_of(bias, 32, R), second + _bias_of(bias, 96, R)
    both = gl.permute(gl.join(first.to(kind), second.to(kind)), [0, 1, 2, 4, 3])
    plain_tile.store(gl.reshape(both, [ROWS, 64]))


@gluon.jit  # type: ignore[untyped-decorator]
def fetch_values(shared, x, first, length, per_token, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin to copy `[T, 64]` of a head's values; after the end, those of the last token."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0])
    t = gl.minimum(first + gl.arange(0, ROWS // R, gl.SliceLayout(1, L)), length - 1)
    p = gl.arange(0, 64, gl.SliceLayout(0, L))
    ptrs = x + (gl.expand_dims(t * per_token, 1) + gl.expand_dims(p, 0))
    copy_in(shared, ptrs)


@gluon.jit  # type: ignore[untyped-decorator]
def fetch_all(x, z, do, first, length, x_l, z_l, do_l, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin to copy a head's values, gates and gradients of the output to new shared memory."""
    kind: gl.constexpr = x.dtype.element_ty
    x_copied = gl.allocate_shared_memory(kind, [ROWS // R, 64], TILE)
    z_copied = gl.allocate_shared_memory(kind, [ROWS // R, 64], TILE)
    do_copied = gl.allocate_shared_memory(kind, [ROWS // R, 64], TILE)
    fetch_values(x_copied, x, first, length, x_l, R)
    fetch_values(z_copied, z, first, length, z_l, R)
    fetch_values(do_copied, do, first, length, do_l, R)
    return x_copied, z_copied, do_copied


@gluon.jit  # type: ignore[untyped-decorator]
def in_columns(shared, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """`[64, T / 8, 1, 8]` of them, in fp32 and the layout of columns."""
    x = shared.permute([1, 0]).load(tokens_layout(R))
    x = gl.reshape(x, [64, ROWS // R // 8, 8])
    return gl.expand_dims(gl.convert_layout(x, without(columns_layout(R), 2)), 2).to(gl.float32)


@gluon.jit  # type: ignore[untyped-decorator]
def fetch_rates(shared, rate, first, length, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin to copy a chunk's rates `[T, 32]`."""
    L: gl.constexpr = angles_layout(R)
    t = gl.minimum(first + gl.arange(0, ROWS // R, gl.SliceLayout(1, L)), length - 1)
    k = gl.arange(0, 32, gl.SliceLayout(0, L))
    ptrs = rate + (gl.expand_dims(t, 1) * 32 + gl.expand_dims(k, 0))
    copy_in(shared, ptrs)


@gluon.jit  # type: ignore[untyped-decorator]
def fetch_flat(shared, x):  # type: ignore[no-untyped-def]
    """Begin to copy values that follow each other."""
    N: gl.constexpr = shared.shape[0]
    SIZE: gl.constexpr = 4 if N >= 1024 else 1
    at = gl.arange(0, N, gl.BlockedLayout([SIZE], [32], [8], [0]))
    copy_in(shared, x + at)


@gluon.jit  # type: ignore[untyped-decorator]
def weights_of(shared, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """`[64, 1, R, 1]` of `[64, R]` in shared memory, in the layout of columns; 1 for SISO."""
    L: gl.constexpr = without(columns_layout(R), 1, 3)
    if R == 1:
        found = gl.full([64, R], 1.0, gl.float32, L)
    else:
        found = gl.convert_layout(shared.load(ranks_layout(R)), L, assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(found, 1), 3)


@gluon.jit  # type: ignore[untyped-decorator]
def vector_of(vectors, i: gl.constexpr, L: gl.constexpr):  # type: ignore[no-untyped-def]
    """One of a chunk's vectors in shared memory, `[T / 8, 8]`."""
    return vectors.index(i).load(L)


@gluon.jit  # type: ignore[untyped-decorator]
def angled(cos, sin, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """Cosine and sine in the layout of the rotation, `[T / 8, 1, 8, 32]`."""
    TH: gl.constexpr = ROWS // R // 8
    L: gl.constexpr = without(rotation_layout(R), 1)
    c = gl.convert_layout(gl.reshape(cos, [TH, 8, 32]), L)
    s = gl.convert_layout(gl.reshape(sin, [TH, 8, 32]), L)
    return gl.expand_dims(c, 1), gl.expand_dims(s, 1)


@gluon.jit  # type: ignore[untyped-decorator]
def inside(do, first, length, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """Gradients of the output in fp32, and zeros after the end of the sequence."""
    L: gl.constexpr = without(columns_layout(R), 0, 2)
    t = gl.expand_dims(gl.expand_dims(tokens(first, L, ROWS // R // 8), 0), 2)
    return gl.where(t < length, do.to(gl.float32), 0.0)


@gluon.jit  # type: ignore[untyped-decorator]
def again(x):  # type: ignore[no-untyped-def]
    """x, of which the compiler does not know that it is: it computes anew what comes from it,
    instead of holding that in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit  # type: ignore[untyped-decorator]
def tokens(first, L: gl.constexpr, TH: gl.constexpr):  # type: ignore[no-untyped-def]
    """`[T / 8, 8]` tokens of a chunk."""
    th, tl = gl.arange(0, TH, gl.SliceLayout(1, L)), gl.arange(0, 8, gl.SliceLayout(0, L))
    return first + gl.expand_dims(th, 1) * 8 + gl.expand_dims(tl, 0)


@gluon.jit  # type: ignore[untyped-decorator]
def product(a, b):  # type: ignore[no-untyped-def]
    """Begin a product of two tiles in shared memory."""
    zero = gl.zeros([64, 64], gl.float32, MMA)
    return hopper.warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit  # type: ignore[untyped-decorator]
def added(a, b, acc):  # type: ignore[no-untyped-def]
    """Begin to add a product of two tiles in shared memory."""
    return hopper.warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit  # type: ignore[untyped-decorator]
def halves(x, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """First and second elements `[32, T / 8, R, 8]` of a rotated tile's transpose, `[64, 64]`."""
    TH: gl.constexpr = ROWS // R // 8
    x = gl.permute(gl.reshape(x, [4, 2, 8, TH, R, 8]), [0, 2, 3, 4, 5, 1])
    one, other = gl.split(gl.reshape(x, [32, TH, R, 8, 2]))
    L: gl.constexpr = half_layout(R)
    return (
        gl.convert_layout(one, L, assert_trivial=True),
        gl.convert_layout(other, L, assert_trivial=True),
    )


@gluon.jit  # type: ignore[untyped-decorator]
def pairs_of(tile, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """First and second elements `[32, T / 8, R, 8]` in fp32 of copied pairs, before rotation."""
    L: gl.constexpr = half_layout(R)
    x = tile.permute([1, 0]).load(raw_half_layout(R))
    x = gl.permute(gl.reshape(x, [2, 32, ROWS // R // 8, R, 8]), [1, 2, 3, 4, 0])
    one, other = gl.split(x)
    return (
        gl.convert_layout(one, L, assert_trivial=True).to(gl.float32),
        gl.convert_layout(other, L, assert_trivial=True).to(gl.float32),
    )


@gluon.jit  # type: ignore[untyped-decorator]
def pair_bias(bias, start: gl.constexpr, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """`[32, 1, R, 1]` of a head's bias in shared memory, `[R, 128]`, in the layout of halves."""
    x = bias.slice(start, 32, 1).permute([1, 0]).load(without(half_layout(R), 1, 3))
    return gl.expand_dims(gl.expand_dims(x, 1), 3)


@gluon.jit  # type: ignore[untyped-decorator]
def flat(x, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """`[64, 64]` of `[T / 8, R, 8, T / 8, R, 8]` or `[64, T / 8, R, 8]`."""
    return gl.convert_layout(gl.reshape(x, [64, 64]), MMA, assert_trivial=True)


@gluon.jit  # type: ignore[untyped-decorator]
def columned(x, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """`[64, T / 8, R, 8]` of a product `[64, 64]`."""
    L: gl.constexpr = columns_layout(R)
    return gl.convert_layout(gl.reshape(x, [64, ROWS // R // 8, R, 8]), L, assert_trivial=True)


@gluon.jit  # type: ignore[untyped-decorator]
def paired(x, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """`[T / 8, R, 8, T / 8, R, 8]` of a product `[64, 64]`."""
    TH: gl.constexpr = ROWS // R // 8
    x = gl.reshape(x, [TH, R, 8, TH, R, 8])
    return gl.convert_layout(x, pairs_layout(R), assert_trivial=True)


@gluon.jit  # type: ignore[untyped-decorator]
def between(  # type: ignore[no-untyped-def]
    vectors, starts, first, length, QUERIES: gl.constexpr, PACKED: gl.constexpr, R: gl.constexpr
):
    """As in `tiles_triton`, `[T / 8, 8, T / 8, 8]`, from a head's vectors in shared memory.

    Rows are keys and columns queries, or where QUERIES is set the other way round.
    """
    TH: gl.constexpr = ROWS // R // 8
    L: gl.constexpr = without(pairs_layout(R), 1, 4)
    row = tokens(0, without(L, 2, 3), TH)
    col = tokens(0, without(L, 0, 1), TH)
    ROW: gl.constexpr = without(L, 2, 3)
    COLUMN: gl.constexpr = without(L, 0, 1)
    KEY: gl.constexpr = COLUMN if QUERIES else ROW
    QUERY: gl.constexpr = ROW if QUERIES else COLUMN
    key, query = row, col
    if QUERIES:
        key, query = col, row
    since_key, later_key = vector_of(vectors, 0, KEY), vector_of(vectors, 3, KEY)
    own, since_query = vector_of(vectors, 4, KEY), vector_of(vectors, 0, QUERY)
    begin = query
    if PACKED:
        begin = gl.load(starts + gl.minimum(first + query, length - 1)) - first
    if QUERIES:
        s, since_key, later_key = _as_columns(key), _as_columns(since_key), _as_columns(later_key)
        own, t, begin = _as_columns(own), _as_rows(query), _as_rows(begin)
        since_query = _as_rows(since_query)
    else:
        s, since_key, later_key = _as_rows(key), _as_rows(since_key), _as_rows(later_key)
        own, t, begin = _as_rows(own), _as_columns(query), _as_columns(begin)
        since_query = _as_columns(since_query)
    seen = s < t
    if PACKED:
        seen = seen & (s >= begin)
    decay = gl.where(seen, gl.exp2(gl.minimum(since_query - since_key, 0.0)), 0.0)
    itself = s == t
    return gl.where(itself, own, decay * later_key), decay, itself


@gluon.jit  # type: ignore[untyped-decorator]
def _as_rows(x):  # type: ignore[no-untyped-def]
    return gl.expand_dims(gl.expand_dims(x, 2), 3)


@gluon.jit  # type: ignore[untyped-decorator]
def _as_columns(x):  # type: ignore[no-untyped-def]
    return gl.expand_dims(gl.expand_dims(x, 0), 1)


@gluon.jit  # type: ignore[untyped-decorator]
def weighed(x, weight, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """`paired` times the weights of pairs of tokens, `[64, 64]`."""
    return flat(paired(x, R) * gl.expand_dims(gl.expand_dims(weight, 1), 4), R)


@gluon.jit  # type: ignore[untyped-decorator]
def by_rows(x, R: gl.constexpr):  # type: ignore[no-untyped-def]
    """`[T, T]` of `[T / 8, 8, T / 8, 8]`; a row in few threads where every warp has all of them."""
    x = gl.reshape(x, [ROWS // R, ROWS // R])
    if R == 1:
        return x
    else:
        LANES: gl.constexpr = [16, 2] if R == 4 else [32, 1]
        L: gl.constexpr = gl.BlockedLayout([1, ROWS // R // 2], LANES, [1, 8], [1, 0])
        return gl.convert_layout(x, L)


@gluon.jit  # type: ignore[untyped-decorator]
def put_values(ptrs, x, first, length, per_token):  # type: ignore[no-untyped-def]
    """Store `[64, T / 8, 8]` to a head's `[length, 64]`."""
    T: gl.constexpr = x.shape[1] * 8
    x = gl.permute(gl.reshape(x, [64, T]), [1, 0]).to(ptrs.dtype.element_ty)
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0])
    x = gl.convert_layout(x, OUT)
    t = first + gl.arange(0, T, gl.SliceLayout(1, OUT))
    p = gl.arange(0, 64, gl.SliceLayout(0, OUT))
    ptrs = ptrs + gl.expand_dims(t, 1) * per_token + gl.expand_dims(p, 0)
    gl.store(ptrs, x, mask=gl.expand_dims(t < length, 1))
