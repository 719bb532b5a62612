"""Device functions of Mamba-3's scan: the weights between the tokens of a chunk, and its tiles.

There is no grid here: the kernels of the scan inline these functions. A chunk has T tokens and
R * T rows; row `r * T + t` is rank r of token t. The n columns of keys, queries and states are
split into two tiles of n / 2: the 2 K rotated columns, and the others, in their order. In the
rotated tile, the first elements of eight pairs are followed by their second ones. In a transposed
product, with ranks and tokens in its columns, a thread then holds both elements of a pair and all
ranks of a token, and adds them without exchanging data with other threads.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

PI = tl.constexpr(math.pi)


@triton.jit  # type: ignore[untyped-decorator]
def _exp(x):  # type: ignore[no-untyped-def]
    """exp(x) in one instruction after a multiplication; Triton's exp takes five."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def sigmoid(x):  # type: ignore[no-untyped-def]
    """The sigmoid to 4e-7 in five instructions; Triton's takes twelve, most for a division."""
    root = tl.rsqrt(1.0 + _exp(-x))
    return root * root


@triton.jit  # type: ignore[untyped-decorator]
def at_rows(x, R: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """`[R * T]` from one value per token, `[T]`."""
    return tl.reshape(tl.broadcast_to(x[None, :], (R, T)), (R * T,))


@triton.jit  # type: ignore[untyped-decorator]
def of_tokens(x, R: tl.constexpr, P: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums `[T]` over everything of a token, from `[P, R * T]`."""
    return tl.sum(tl.sum(tl.reshape(x, (P, R, T)), 1), 0)


@triton.jit  # type: ignore[untyped-decorator]
def shares(dt, trap, offs_head, first, length, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights `[T]` of the tokens: dt, that of a token in its own state, and that in later states.

    By the trapezoidal rule, a token also enters the next step, by dt and (1 - trap) of the next
    token. For the last token of a document these are another document's, but no token sees them.
    """
    t = first + tl.arange(0, T)
    step = tl.load(dt + offs_head + t, mask=t < length, other=0.0)
    share = sigmoid(tl.load(trap + offs_head + t, mask=t < length, other=0.0).to(tl.float32))
    after = tl.load(dt + offs_head + t + 1, mask=t + 1 < length, other=0.0)
    share_after = tl.load(trap + offs_head + t + 1, mask=t + 1 < length, other=0.0).to(tl.float32)
    at_once = share * step
    return step, at_once, at_once + (1.0 - sigmoid(share_after)) * after


@triton.jit  # type: ignore[untyped-decorator]
def begins(starts, first, length, PACKED: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first tokens of the documents of a chunk's tokens, and of that of its last token."""
    t = first + tl.arange(0, T)
    begin = tl.load(starts + t, mask=t < length, other=0) if PACKED else tl.zeros((T,), tl.int32)
    return begin, tl.max(begin, 0)


@triton.jit  # type: ignore[untyped-decorator]
def decays(log_a, offs_head, first, length, begin, last, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cumulative log decays of a chunk, and decays into it `[T]`, out of it `[T]` and across it.

    `into` is the decay from the state before the chunk to a token, `out_of` that from a token to
    the state after the chunk; each is 0 if a document begins in between.
    """
    t = first + tl.arange(0, T)
    log_a_t = tl.load(log_a + offs_head + t, mask=t < length, other=0.0)
    since = tl.cumsum(log_a_t, 0)
    log_total = tl.sum(log_a_t, 0)
    into = tl.where(begin < first, _exp(since), 0.0)
    out_of = tl.where(t >= last, _exp(tl.minimum(log_total - since, 0.0)), 0.0)
    return since, into, out_of, tl.where(last < first, _exp(log_total), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def between(since, begin, first, at_once, later, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights `[T, T]` of a token, the row's, in the output of one, the column's; their decays, and
    the diagonal.

    Weights and decays are 0 if the row's token is not earlier, or is of another document; the
    diagonal has a weight, but no decay.
    """
    t = tl.arange(0, T)
    seen = (t[:, None] < t[None, :]) & ((first + t)[:, None] >= begin[None, :])
    decay = tl.where(seen, _exp(tl.minimum(since[None, :] - since[:, None], 0.0)), 0.0)
    itself = t[:, None] == t[None, :]
    return tl.where(itself, at_once[:, None], decay * later[:, None]), decay, itself


@triton.jit  # type: ignore[untyped-decorator]
def weighed(x, weight, R: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """`[R * T, R * T]` times the weights `[T, T]` of pairs of tokens."""
    tile = tl.reshape(x, (R, T, R, T)) * weight[None, :, None, :]
    return tl.reshape(tile, (R * T, R * T))


@triton.jit  # type: ignore[untyped-decorator]
def rates(angles, per_token, first, length, K: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Hyperbolic tangents of a chunk's angles, `[T, K]`."""
    t, k = tl.arange(0, T), tl.arange(0, K)
    ptrs = angles + tl.cast(first, tl.int64) * per_token + t[:, None] * per_token + k[None, :]
    x = tl.load(ptrs, mask=(first + t < length)[:, None], other=0.0).to(tl.float32)
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0  # not `sigmoid`: angles accumulate its errors


@triton.jit  # type: ignore[untyped-decorator]
def _sine(turn):  # type: ignore[no-untyped-def]
    """The sine of an angle in turns, between -1/4 and 1/4, to 2e-7: a least-squares polynomial."""
    square = turn * turn
    poly = 39.71090849 * square - 76.57499094
    poly = poly * square + 81.60223119
    poly = poly * square - 41.34167748
    return (poly * square + 6.283185274) * turn


@triton.jit  # type: ignore[untyped-decorator]
def fraction(turns):  # type: ignore[no-untyped-def]
    """The same angle, reduced to between -1/2 and 1/2 turn."""
    return turns - tl.floor(turns + 0.5)


@triton.jit  # type: ignore[untyped-decorator]
def turned(rate, step, theta, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosine and sine `[T, K]` of a head's angles, which are `theta` `[K]` before the chunk."""
    turns = tl.cumsum(rate * step[:, None] * 0.5, 0) + tl.load(theta + tl.arange(0, K))[None, :]
    cos = _sine(0.25 - tl.abs(fraction(turns)))
    return cos, _sine(0.25 - tl.abs(fraction(turns - 0.25)))


@triton.jit  # type: ignore[untyped-decorator]
def biased(  # type: ignore[no-untyped-def]
    x, bias, columns, first, length, G: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """`[R, T, columns]` of keys or queries of a group with a head's bias, in fp32, unrotated."""
    r, t = tl.arange(0, R)[:, None, None], tl.arange(0, T)[None, :, None]
    ptrs = x + tl.cast(first, tl.int64) * (R * G * 4 * K)
    ptrs += t * (R * G * 4 * K) + r * (G * 4 * K) + columns[None, None, :]
    tile = tl.load(ptrs, mask=first + t < length, other=0.0).to(tl.float32)
    return tile + tl.load(bias + r * (4 * K) + columns[None, None, :])


@triton.jit  # type: ignore[untyped-decorator]
def turned_rows(  # type: ignore[no-untyped-def]
    x, bias, cos, sin, first, length, G: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """The rotated tile `[R * T, 2 K]` of keys or queries in their type; rotated in fp32."""
    kind = x.dtype.element_ty
    one = biased(x, bias, tl.arange(0, K), first, length, G, R, K, T)
    other = biased(x, bias, tl.arange(0, K) + 2 * K, first, length, G, R, K, T)
    c, s = cos[None, :, :], sin[None, :, :]
    tile = tl.join((one * c - other * s).to(kind), (one * s + other * c).to(kind))
    tile = tl.permute(tl.reshape(tile, (R, T, K // 8, 8, 2)), (0, 1, 2, 4, 3))
    return tl.reshape(tile, (R * T, 2 * K))


@triton.jit  # type: ignore[untyped-decorator]
def plain_rows(  # type: ignore[no-untyped-def]
    x, bias, first, length, G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """The tile `[R * T, 2 K]` of the columns that are not rotated, in the type of x."""
    tile = biased(x, bias, plain_columns(K), first, length, G, R, K, T)
    return tl.reshape(tile.to(x.dtype.element_ty), (R * T, 2 * K))


@triton.jit  # type: ignore[untyped-decorator]
def state_tile(P: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of a tile `[P, 2 K]` of a stored state."""
    return tl.arange(0, P)[:, None] * (2 * K) + tl.arange(0, 2 * K)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def pairs(x, R: tl.constexpr, K: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """First and second elements of the pairs of a rotated tile's transpose, `[K, R, T]` each."""
    tile = tl.permute(tl.reshape(x, (K // 8, 2, 8, R, T)), (0, 2, 3, 4, 1))
    return tl.split(tl.reshape(tile, (K, R, T, 2)))


@triton.jit  # type: ignore[untyped-decorator]
def by_column(weight, R: tl.constexpr, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """`[P, R, 1]` of a head's `[R, P]`."""
    p, r = tl.arange(0, P)[:, None, None], tl.arange(0, R)[None, :, None]
    return tl.load(weight + r * P + p)


@triton.jit  # type: ignore[untyped-decorator]
def columns_of(x, first, length, per_token, P: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """`[P, 1, T]` of a head's values, in fp32."""
    p, t = tl.arange(0, P)[:, None, None], tl.arange(0, T)[None, None, :]
    ptrs = x + tl.cast(first, tl.int64) * per_token + t * per_token + p
    return tl.load(ptrs, mask=first + t < length, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def factors(  # type: ignore[no-untyped-def]
    x, z, do, rank_x, rank_z, rank_out, first, length, x_l, z_l, do_l, R: tl.constexpr,
    P: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A head's values and the gradients of its output before the gate, `[P, R * T]` in its type.

    These are the operands of the products within a chunk.
    """
    kind = x.dtype.element_ty
    v = columns_of(x, first, length, x_l, P, T) * by_column(rank_x, R, P)
    gate, _ = gated(columns_of(z, first, length, z_l, P, T), by_column(rank_z, R, P))
    dy = columns_of(do, first, length, do_l, P, T) * by_column(rank_out, R, P) * gate
    return tl.reshape(v.to(kind), (P, R * T)), tl.reshape(dy.to(kind), (P, R * T))


@triton.jit  # type: ignore[untyped-decorator]
def put_values(ptrs, x, first, length, per_token, P: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a head's tile `[P, T]` to `[T, P]`, in the type of the destination."""
    p, t = tl.arange(0, P)[:, None], tl.arange(0, T)[None, :]
    ptrs += tl.cast(first, tl.int64) * per_token + t * per_token + p
    tl.store(ptrs, x.to(ptrs.dtype.element_ty), mask=first + t < length)


@triton.jit  # type: ignore[untyped-decorator]
def put_sum(sums, x, columns, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the sum over tokens of `[columns, R, T]` to `[columns, R]`."""
    tl.store(sums + columns[:, None] * R + tl.arange(0, R)[None, :], tl.sum(x, 2))


@triton.jit  # type: ignore[untyped-decorator]
def plain_columns(K: tl.constexpr):  # type: ignore[no-untyped-def]
    """The columns that are not rotated: the second K of either half."""
    i = tl.arange(0, 2 * K)
    return i + K + tl.where(i >= K, K, 0)


@triton.jit  # type: ignore[untyped-decorator]
def gated(z, weight):  # type: ignore[no-untyped-def]
    """SiLU of the gate, z times a rank's weight, and its derivative."""
    gate = z * weight
    share = sigmoid(gate)
    return gate * share, share * (1.0 + gate * (1.0 - share))
