"""DSA's sparse attention with a key per head, on CUDA: forward and backward.

A gathered key of a single head is a vector, on which tensor cores cannot be used. Tiles of queries
and keys are therefore multiplied as in flash attention, masked by one bit per query and key; tiles
without any set bit are not in the list over which a program iterates (`dsa_attention_bits_triton`).

For products, dS is split into two terms in the type of the inputs, and so is P if the gradient of
the output is needed; everything else is fp32. Delta is the product of the upstream gradient with
the output and its rounding error (`rest`), see `dsa_attention_forward_triton`. No floating-point
sum is atomic: each has a fixed order, independent of the batch and of the parts in which the
queries are processed, so results are bitwise reproducible.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.bits_triton import UNIT, chosen
from cppmega.ops.common.device import contiguous_rows, gpu_of
from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.tiles_triton import LOG2_E, padded, rows_of
from cppmega.ops.dsa_attention.bits_triton import Bits, Lists
from cppmega.ops.dsa_attention.per_head_tiles import tiles_for, widths_of

P_TERMS, DS_TERMS = 1, 2
"""Number of terms in the inputs' type into which P and dS are split for their products.

With one term of dS the errors of dq and dk are 1.4 to 2 times those of rounding exact results; with
two they are 1.0 times, as long as P has two in the forward. With one term of P here, the error of
dv is 1.4 times.
"""


@triton.jit  # type: ignore[untyped-decorator]
def _tile_of_program(HEADS: tl.constexpr, tiles, reverse: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sequence, head and tile of a program; the tiles of a head share its rows in L2."""
    tile, at = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if reverse:  # the longest first
        tile = tiles - 1 - tile
    return (at // HEADS).to(tl.int64), at % HEADS, tile


@triton.jit  # type: ignore[untyped-decorator]
def _add_product(left, right, sums, TERMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums + left @ right, with left rounded to the type of right, or split into two such terms."""
    high = left.to(right.dtype)
    sums = tl.dot(high, right, sums, input_precision="ieee")
    if TERMS == 2:
        low = (left - high.to(tl.float32)).to(right.dtype)
        sums = tl.dot(low, right, sums, input_precision="ieee")
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    out, sums, row, inside, step, by, WIDTH: tl.constexpr, PAD: tl.constexpr
):
    """Store the sums of a tile's rows, multiplied by `by`."""
    d = tl.arange(0, PAD)
    place = out + row.to(tl.int64)[:, None] * step + d[None, :]
    mask = inside[:, None] & (d < WIDTH)[None, :]
    tl.store(place, (sums * by).to(out.dtype.element_ty), mask=mask)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(  # type: ignore[no-untyped-def]
    query, key, value, bits, lists, counts, out, rest, lse, scale, sq, sk, q0, words, tiles, others,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, o_row,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BITS: tl.constexpr, P_TERMS: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """The output of a tile of one head's queries, and the log2 of the sums of exponentials."""
    b, head, tile = _tile_of_program(HEADS, tiles, True)
    near = tile * QUERIES + tl.arange(0, QUERIES)
    row = q0 + near
    inside = row < sq
    query += b * q_batch + head * q_head
    key += b * k_batch + head * k_head
    value += b * v_batch + head * v_head
    queries = rows_of(query, row, q_row, inside, D, D_PAD)
    if E > 0:
        queries_2 = rows_of(query + D, row, q_row, inside, E, E_PAD)
    word = bits + (b * tiles * QUERIES + near) * words
    top = tl.full([QUERIES], -3.0e38, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, V_PAD], tl.float32)
    lists += (b * tiles + tile) * others
    at = tl.load(lists)
    for step in range(0, tl.load(counts + b * tiles + tile)):
        following = tl.load(lists + step + 1)
        lane = at * KEYS + tl.arange(0, KEYS)
        keys = rows_of(key, lane, k_row, lane < sk, D, D_PAD)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if E > 0:
            keys_2 = rows_of(key + D, lane, k_row, lane < sk, E, E_PAD)
            s = tl.dot(queries_2, tl.trans(keys_2), s, input_precision="ieee")
        seen = chosen(word + at * (KEYS // BITS), tl.arange(0, KEYS), BITS)
        s = tl.where(seen, s * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - higher[:, None])
        by = tl.exp2(top - higher)
        total = total * by + tl.sum(p, axis=1)
        values = rows_of(value, lane, v_row, lane < sk, V, V_PAD)
        sums = _add_product(p, values, sums * by[:, None], P_TERMS)
        top = higher
        at = following
    empty = total == 0.0
    sums = sums / tl.where(empty, 1.0, total)[:, None]
    d = tl.arange(0, V_PAD)
    place = row.to(tl.int64)[:, None] * o_row + (b * HEADS + head) * V + d[None, :]
    mask = inside[:, None] & (d < V)[None, :]
    rounded = sums.to(out.dtype.element_ty)
    tl.store(out + place, rounded, mask=mask)
    if REST:
        less = (sums - rounded.to(tl.float32)).to(rest.dtype.element_ty)
        tl.store(rest + place, less, mask=mask)
        sum_log = tl.where(empty, float("inf"), top + tl.log2(total))
        tl.store(lse + (b * HEADS + head) * sq + row, sum_log, mask=inside)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _query_kernel(  # type: ignore[no-untyped-def]
    query, key, value, bits, lists, counts, out, rest, upstream, lse, delta, dq,
    scale, softmax_scale, sq, sk, q0, words, tiles, others,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head,
    g_row, g_batch, g_head, o_row, dq_row,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BITS: tl.constexpr, DS_TERMS: tl.constexpr,
):  # fmt: skip
    """dq and delta of a tile of one head's queries."""
    b, head, tile = _tile_of_program(HEADS, tiles, True)
    near = tile * QUERIES + tl.arange(0, QUERIES)
    row = q0 + near
    inside = row < sq
    query += b * q_batch + head * q_head
    key += b * k_batch + head * k_head
    value += b * v_batch + head * v_head
    up = rows_of(upstream + b * g_batch + head * g_head, row, g_row, inside, V, V_PAD)
    at_out = (b * HEADS + head) * V
    result = rows_of(out + at_out, row, o_row, inside, V, V_PAD).to(tl.float32)
    result += rows_of(rest + at_out, row, o_row, inside, V, V_PAD).to(tl.float32)
    less = tl.sum(result * up.to(tl.float32), axis=1)
    at_row = (b * HEADS + head) * sq + row
    tl.store(delta + at_row, less, mask=inside)
    sum_log = tl.load(lse + at_row, mask=inside, other=float("inf"))
    queries = rows_of(query, row, q_row, inside, D, D_PAD)
    sums = tl.zeros([QUERIES, D_PAD], tl.float32)
    if E > 0:
        queries_2 = rows_of(query + D, row, q_row, inside, E, E_PAD)
        sums_2 = tl.zeros([QUERIES, E_PAD], tl.float32)
    word = bits + (b * tiles * QUERIES + near) * words
    lists += (b * tiles + tile) * others
    at = tl.load(lists)
    for step in range(0, tl.load(counts + b * tiles + tile)):
        following = tl.load(lists + step + 1)
        lane = at * KEYS + tl.arange(0, KEYS)
        keys = rows_of(key, lane, k_row, lane < sk, D, D_PAD)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if E > 0:
            keys_2 = rows_of(key + D, lane, k_row, lane < sk, E, E_PAD)
            s = tl.dot(queries_2, tl.trans(keys_2), s, input_precision="ieee")
        values = rows_of(value, lane, v_row, lane < sk, V, V_PAD)
        dp = tl.dot(up, tl.trans(values), input_precision="ieee")
        seen = chosen(word + at * (KEYS // BITS), tl.arange(0, KEYS), BITS)
        p = tl.where(seen, tl.exp2(s * scale - sum_log[:, None]), 0.0)
        ds = p * (dp - less[:, None])
        sums = _add_product(ds, keys, sums, DS_TERMS)
        if E > 0:
            sums_2 = _add_product(ds, keys_2, sums_2, DS_TERMS)
        at = following
    dq += (b * HEADS + head) * (D + E)
    _store(dq, sums, row, inside, dq_row, softmax_scale, D, D_PAD)
    if E > 0:
        _store(dq + D, sums_2, row, inside, dq_row, softmax_scale, E, E_PAD)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _key_kernel(  # type: ignore[no-untyped-def]
    query, key, value, bits, lists, counts, upstream, lse, delta, dk, dv,
    scale, by, sq, sk, q0, words, tiles, others,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head,
    g_row, g_batch, g_head, dk_row, dv_row,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BITS: tl.constexpr, P_TERMS: tl.constexpr,
    DS_TERMS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of one head's keys, with products keys by queries."""
    b, head, tile = _tile_of_program(HEADS, tiles, False)
    lane = tile * KEYS + tl.arange(0, KEYS)
    inside = lane < sk
    query += b * q_batch + head * q_head
    key += b * k_batch + head * k_head
    value += b * v_batch + head * v_head
    upstream += b * g_batch + head * g_head
    dk += (b * HEADS + head) * (D + E)
    dv += (b * HEADS + head) * V
    keys = rows_of(key, lane, k_row, inside, D, D_PAD)
    values = rows_of(value, lane, v_row, inside, V, V_PAD)
    if ADD:  # continues the sums of the previous part
        sums = rows_of(dk, lane, dk_row, inside, D, D_PAD).to(tl.float32)
        sums_v = rows_of(dv, lane, dv_row, inside, V, V_PAD).to(tl.float32)
    else:
        sums = tl.zeros([KEYS, D_PAD], tl.float32)
        sums_v = tl.zeros([KEYS, V_PAD], tl.float32)
    if E > 0:
        keys_2 = rows_of(key + D, lane, k_row, inside, E, E_PAD)
        if ADD:
            sums_2 = rows_of(dk + D, lane, dk_row, inside, E, E_PAD).to(tl.float32)
        else:
            sums_2 = tl.zeros([KEYS, E_PAD], tl.float32)
    word = bits + (b * tiles * KEYS + lane) * words
    at_head = (b * HEADS + head) * sq
    lists += (b * tiles + tile) * others
    at = tl.load(lists)
    for step in range(0, tl.load(counts + b * tiles + tile)):
        following = tl.load(lists + step + 1)
        row = q0 + at * QUERIES + tl.arange(0, QUERIES)
        queries = rows_of(query, row, q_row, row < sq, D, D_PAD)
        s = tl.dot(keys, tl.trans(queries), input_precision="ieee")
        if E > 0:
            queries_2 = rows_of(query + D, row, q_row, row < sq, E, E_PAD)
            s = tl.dot(keys_2, tl.trans(queries_2), s, input_precision="ieee")
        up = rows_of(upstream, row, g_row, row < sq, V, V_PAD)
        dp = tl.dot(values, tl.trans(up), input_precision="ieee")
        sum_log = tl.load(lse + at_head + row, mask=row < sq, other=float("inf"))
        less = tl.load(delta + at_head + row, mask=row < sq, other=0.0)
        seen = chosen(word + at * (QUERIES // BITS), tl.arange(0, QUERIES), BITS)
        p = tl.where(seen, tl.exp2(s * scale - sum_log[None, :]), 0.0)
        sums_v = _add_product(p, up, sums_v, P_TERMS)
        ds = p * (dp - less[None, :])
        sums = _add_product(ds, queries, sums, DS_TERMS)
        if E > 0:
            sums_2 = _add_product(ds, queries_2, sums_2, DS_TERMS)
        at = following
    _store(dk, sums, lane, inside, dk_row, by, D, D_PAD)
    if E > 0:
        _store(dk + D, sums_2, lane, inside, dk_row, by, E, E_PAD)
    _store(dv, sums_v, lane, inside, dv_row, 1.0, V, V_PAD)


@on_its_device
@triton.jit  # type: ignore[untyped-decorator]
def _shared_kernel(  # type: ignore[no-untyped-def]
    shares, out, rows, HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the contributions of all heads, `[rows, heads, D]`, in a fixed order."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros([ROWS, D_PAD], tl.float32)
    for head in range(0, HEADS):
        sums += rows_of(shares + head * D, row, HEADS * D, row < rows, D, D_PAD)
    _store(out, sums, row, row < rows, D, 1.0, D, D_PAD)


class Heads:
    """The tensors of one call, and its launches.

    Args:
        query: `[sq, b, heads, d]`.
        key: `[sk, b, heads or 1, d]`.
        value: `[sk, b, heads or 1, v]`.
        softmax_scale: factor on the products.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, softmax_scale: float) -> None:
        tensors = map(contiguous_rows, (query, key, value))
        self.query, self.key, self.value = tensors
        self.softmax_scale, self.scale = softmax_scale, softmax_scale * LOG2_E
        self.sq, self.batch, self.heads, self.width = query.shape
        self.sk, self.value_width = key.size(0), value.size(-1)
        self.tiles = tiles_for(self.width, self.value_width, gpu_of(query.device))

    def outputs(self, want_gradients: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Allocate the output, and its rounding error and log-sum-exps `[b, heads, sq]` if
        gradients are needed."""
        new = self.query.new_empty
        shape = (self.sq, self.batch, self.heads, self.value_width)
        if not want_gradients:
            return new(shape), None, None
        by_row = new((self.batch, self.heads, self.sq), dtype=torch.float32)
        return new(shape), new(shape), by_row

    def _strides(self) -> tuple[int, ...]:
        """Strides by row, batch and head; the head's stride is 0 if all heads share one."""
        tensors = (self.query, self.key, self.value)
        return tuple(
            0 if at == 2 and x.size(2) == 1 else x.stride(at) for x in tensors for at in range(3)
        )

    def _common(self) -> dict[str, Any]:
        names = ("D", "D_PAD", "E", "E_PAD")
        return {
            "HEADS": self.heads,
            "V": self.value_width,
            "V_PAD": padded(self.value_width),
            **dict(zip(names, widths_of(self.width), strict=True)),
        }

    def forward(self, bits: Bits, out: Tensor, rest: Tensor | None, lse: Tensor | None) -> None:
        """Write a part's output and, if they are allocated, the tensors that the backward needs."""
        tile = self.tiles.forward
        lists = bits.lists(tile.queries, tile.keys, of_keys=False)
        tiles, others = lists.tiles.shape[1:]
        _forward_kernel[(tiles * self.batch * self.heads,)](
            self.query, self.key, self.value, bits.by_query, *lists,
            out, out if rest is None else rest, out if lse is None else lse, self.scale,
            self.sq, self.sk, bits.part[0], bits.columns // UNIT, tiles, others,
            *self._strides(), out.stride(0),
            REST=rest is not None, P_TERMS=1 if rest is None else 2,
            **self._common(), **tile.options(),
        )  # fmt: skip


class Gradients:
    """The gradients of one call; call `write` for each part of the queries, in order.

    Args:
        heads: the call.
        upstream: the gradient of the output.
        out: the output.
        rest: its rounding error.
        lse: the log-sum-exps.
        parts: the number of parts.

    Attributes:
        dq: the gradient of the queries.
    """

    def __init__(
        self, heads: Heads, upstream: Tensor, out: Tensor, rest: Tensor, lse: Tensor, parts: int
    ) -> None:
        self.heads, self.out, self.rest, self.lse = heads, out, rest, lse
        self.upstream = contiguous_rows(upstream)
        self.delta = torch.empty_like(lse)
        self.dq = torch.empty(heads.query.shape, dtype=out.dtype, device=out.device)
        self.dk, self.dv = (self._shares(x, parts > 1) for x in (heads.key, heads.value))

    def _shares(self, tensor: Tensor, several: bool) -> Tensor:
        """Allocate the gradient of keys by head, in fp32 if several parts add to it."""
        sk, batch, heads, width = tensor.shape
        is_final = heads == self.heads.heads and not several
        shape = (sk, batch, self.heads.heads, width)
        return tensor.new_empty(shape, dtype=tensor.dtype if is_final else torch.float32)

    def write(self, bits: Bits) -> None:
        """Write the part's rows of dq, and add its contribution to dk and dv."""
        heads = self.heads
        self._of_queries(bits, bits.lists(*heads.tiles.query[:2], of_keys=False))
        queries, keys = heads.tiles.key[:2]
        self._of_keys(bits, bits.lists(keys, queries, of_keys=True))

    def _of_queries(self, bits: Bits, lists: Lists) -> None:
        heads, (tiles, others) = self.heads, lists.tiles.shape[1:]
        _query_kernel[(tiles * heads.batch * heads.heads,)](
            heads.query, heads.key, heads.value, bits.by_query, *lists,
            self.out, self.rest, self.upstream, self.lse, self.delta, self.dq,
            heads.scale, heads.softmax_scale,
            heads.sq, heads.sk, bits.part[0], bits.columns // UNIT, tiles, others,
            *heads._strides(), *self.upstream.stride()[:3], self.out.stride(0), self.dq.stride(0),
            DS_TERMS=DS_TERMS, **heads._common(), **heads.tiles.query.options(),
        )  # fmt: skip

    def _of_keys(self, bits: Bits, lists: Lists) -> None:
        heads, (tiles, others) = self.heads, lists.tiles.shape[1:]
        first, last = bits.part
        _key_kernel[(tiles * heads.batch * heads.heads,)](
            heads.query, heads.key, heads.value, bits.by_key, *lists,
            self.upstream, self.lse, self.delta, self.dk, self.dv,
            heads.scale, heads.softmax_scale if last == heads.sq else 1.0,
            heads.sq, heads.sk, first, bits.rows // UNIT, tiles, others,
            *heads._strides(), *self.upstream.stride()[:3], self.dk.stride(0), self.dv.stride(0),
            ADD=first > 0, P_TERMS=P_TERMS, DS_TERMS=DS_TERMS, **heads._common(),
            **heads.tiles.key.options(),
        )  # fmt: skip

    def of_keys_and_values(self) -> tuple[Tensor, Tensor]:
        """dk and dv, after the last part."""
        return self._combined(self.dk, self.heads.key), self._combined(self.dv, self.heads.value)

    def _combined(self, shares: Tensor, tensor: Tensor) -> Tensor:
        if shares.size(2) == tensor.size(2):
            return shares.to(tensor.dtype)
        out = tensor.new_empty(tensor.shape)
        rows, width = out.size(0) * out.size(1), out.size(3)
        _shared_kernel[(triton.cdiv(rows, 16),)](
            shares, out, rows, HEADS=shares.size(2), D=width, D_PAD=padded(width), ROWS=16
        )
        return out
