"""DSA's sparse attention with a key per head, on CUDA: forward and backward.

A gathered key of a single head is a vector, on which tensor cores cannot be used. Tiles of queries
and keys are therefore multiplied as in flash attention, masked by one bit per query and key; tiles
without any set bit are not in the list over which a program iterates (`bits_triton`).

- `_forward_kernel`: grid tiles of queries x heads x batch. A program holds BLOCK_M queries, m_i,
  l_i and acc `[BLOCK_M, V]` in fp32. It reads K and V once per listed tile and writes O once; with
  gradients also its rounding error (`rest`) and the log-sum-exps.
- `_query_kernel`: the same grid. A program holds Q, dO and the accumulator of dQ; it reads out and
  `rest` once for delta, K and V once per listed tile, and writes delta and dQ once.
- `_key_kernel`: grid tiles of keys x heads x batch. A program holds K, V and the accumulators of dK
  and dV, which it writes once; it reads Q, dO, the log-sum-exps and delta once per listed tile.
- `_shared_kernel`: grid blocks of 16 rows. It reads the contributions of all heads to a shared key
  once and writes their sum once; it is limited by memory bandwidth.

Tensor cores limit the first three: a listed tile is multiplied completely, however few of its bits
are set. Registers limit the size of the tiles (`per_head_tiles`).

For products, dS is split into two terms in the type of the inputs, and so is P if the gradient of
the output is needed; everything else is fp32. Delta is the product of dO with the output and its
rounding error, see `forward_triton`. No floating-point sum is atomic: each has a fixed order,
independent of the batch and of the parts in which the queries are processed, so results are bitwise
reproducible.
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
from cppmega.ops.common.tiles_triton import LOG2_E, padded, product, rows_of
from cppmega.ops.dsa_attention.bits_triton import Bits, Lists
from cppmega.ops.dsa_attention.per_head_tiles import tiles_for, widths_of

SPLIT_P, SPLIT_DS = False, True
"""Whether the backward splits P and dS into two terms in the inputs' type for their products.

With one term of dS the errors of dq and dk are 1.4 to 2 times those of rounding exact results; with
two they are 1.0 times, as long as the forward splits P. With one term of P here, the error of dv is
1.4 times.
"""


@triton.jit
def _tile_of_program(HEADS: tl.constexpr, tiles, reverse: tl.constexpr):
    """The sequence, head and tile of a program; the tiles of a head share its rows in L2."""
    tile, at = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if reverse:  # the longest first
        tile = tiles - 1 - tile
    return (at // HEADS).to(tl.int64), at % HEADS, tile


@triton.jit
def _store(out, acc, row, inside, step, factor, WIDTH: tl.constexpr, PAD: tl.constexpr):
    """Store the rows of an accumulator, multiplied by `factor`."""
    offs_d = tl.arange(0, PAD)
    ptrs = out + row.to(tl.int64)[:, None] * step + offs_d[None, :]
    mask = inside[:, None] & (offs_d < WIDTH)[None, :]
    tl.store(ptrs, (acc * factor).to(out.dtype.element_ty), mask=mask)


@on_its_device
@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, bits, lists, counts, out, rest, lse,
    scale, sq, sk, q0, words, tiles, others,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, o_row,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """O of a tile of one head's queries, its rounding error, and the log-sum-exps in base 2."""
    b, head, tile = _tile_of_program(HEADS, tiles, True)
    offs_part = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_m = q0 + offs_part
    inside = offs_m < sq
    q_ptr += b * q_batch + head * q_head
    k_ptr += b * k_batch + head * k_head
    v_ptr += b * v_batch + head * v_head
    q = rows_of(q_ptr, offs_m, q_row, inside, D, D_PAD)
    if E > 0:
        q_2 = rows_of(q_ptr + D, offs_m, q_row, inside, E, E_PAD)
    word = bits + (b * tiles * BLOCK_M + offs_part) * words
    m_i = tl.full([BLOCK_M], -3.0e38, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
    lists += (b * tiles + tile) * others
    tile_n = tl.load(lists)
    for step in range(0, tl.load(counts + b * tiles + tile)):
        next_n = tl.load(lists + step + 1)
        offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = rows_of(k_ptr, offs_n, k_row, offs_n < sk, D, D_PAD)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if E > 0:
            k_2 = rows_of(k_ptr + D, offs_n, k_row, offs_n < sk, E, E_PAD)
            s = tl.dot(q_2, tl.trans(k_2), s, input_precision="ieee")
        chosen_mn = chosen(word + tile_n * (BLOCK_N // BITS), tl.arange(0, BLOCK_N), BITS)
        s = tl.where(chosen_mn, s * scale, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        v = rows_of(v_ptr, offs_n, v_row, offs_n < sk, V, V_PAD)
        acc = product(p, v, acc * alpha[:, None], REST)
        m_i = m_new
        tile_n = next_n
    empty = l_i == 0.0
    acc = acc / tl.where(empty, 1.0, l_i)[:, None]
    offs_d = tl.arange(0, V_PAD)
    offs_o = offs_m.to(tl.int64)[:, None] * o_row + (b * HEADS + head) * V + offs_d[None, :]
    mask_o = inside[:, None] & (offs_d < V)[None, :]
    rounded = acc.to(out.dtype.element_ty)
    tl.store(out + offs_o, rounded, mask=mask_o)
    if REST:
        residual = (acc - rounded.to(tl.float32)).to(rest.dtype.element_ty)
        tl.store(rest + offs_o, residual, mask=mask_o)
        lse_i = tl.where(empty, float("inf"), m_i + tl.log2(l_i))
        tl.store(lse + (b * HEADS + head) * sq + offs_m, lse_i, mask=inside)


@on_its_device
@triton.jit
def _query_kernel(
    q_ptr, k_ptr, v_ptr, bits, lists, counts, out, rest, do_ptr, lse, delta_ptr, dq,
    scale, softmax_scale, sq, sk, q0, words, tiles, others,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head,
    g_row, g_batch, g_head, o_row, dq_row,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, SPLIT_DS: tl.constexpr,
):  # fmt: skip
    """dQ and delta of a tile of one head's queries."""
    b, head, tile = _tile_of_program(HEADS, tiles, True)
    offs_part = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_m = q0 + offs_part
    inside = offs_m < sq
    q_ptr += b * q_batch + head * q_head
    k_ptr += b * k_batch + head * k_head
    v_ptr += b * v_batch + head * v_head
    do = rows_of(do_ptr + b * g_batch + head * g_head, offs_m, g_row, inside, V, V_PAD)
    head_o = (b * HEADS + head) * V
    o = rows_of(out + head_o, offs_m, o_row, inside, V, V_PAD).to(tl.float32)
    o += rows_of(rest + head_o, offs_m, o_row, inside, V, V_PAD).to(tl.float32)
    delta = tl.sum(o * do.to(tl.float32), axis=1)
    offs_lse = (b * HEADS + head) * sq + offs_m
    tl.store(delta_ptr + offs_lse, delta, mask=inside)
    lse_i = tl.load(lse + offs_lse, mask=inside, other=float("inf"))
    q = rows_of(q_ptr, offs_m, q_row, inside, D, D_PAD)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    if E > 0:
        q_2 = rows_of(q_ptr + D, offs_m, q_row, inside, E, E_PAD)
        acc_2 = tl.zeros([BLOCK_M, E_PAD], tl.float32)
    word = bits + (b * tiles * BLOCK_M + offs_part) * words
    lists += (b * tiles + tile) * others
    tile_n = tl.load(lists)
    for step in range(0, tl.load(counts + b * tiles + tile)):
        next_n = tl.load(lists + step + 1)
        offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = rows_of(k_ptr, offs_n, k_row, offs_n < sk, D, D_PAD)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if E > 0:
            k_2 = rows_of(k_ptr + D, offs_n, k_row, offs_n < sk, E, E_PAD)
            s = tl.dot(q_2, tl.trans(k_2), s, input_precision="ieee")
        v = rows_of(v_ptr, offs_n, v_row, offs_n < sk, V, V_PAD)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        chosen_mn = chosen(word + tile_n * (BLOCK_N // BITS), tl.arange(0, BLOCK_N), BITS)
        p = tl.where(chosen_mn, tl.exp2(s * scale - lse_i[:, None]), 0.0)
        ds = p * (dp - delta[:, None])
        acc = product(ds, k, acc, SPLIT_DS)
        if E > 0:
            acc_2 = product(ds, k_2, acc_2, SPLIT_DS)
        tile_n = next_n
    dq += (b * HEADS + head) * (D + E)
    _store(dq, acc, offs_m, inside, dq_row, softmax_scale, D, D_PAD)
    if E > 0:
        _store(dq + D, acc_2, offs_m, inside, dq_row, softmax_scale, E, E_PAD)


@on_its_device
@triton.jit
def _key_kernel(
    q_ptr, k_ptr, v_ptr, bits, lists, counts, do_ptr, lse, delta_ptr, dk, dv,
    scale, dk_factor, sq, sk, q0, words, tiles, others,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head,
    g_row, g_batch, g_head, dk_row, dv_row,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, SPLIT_P: tl.constexpr,
    SPLIT_DS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of one head's keys, with products keys by queries."""
    b, head, tile = _tile_of_program(HEADS, tiles, False)
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offs_n < sk
    q_ptr += b * q_batch + head * q_head
    k_ptr += b * k_batch + head * k_head
    v_ptr += b * v_batch + head * v_head
    do_ptr += b * g_batch + head * g_head
    dk += (b * HEADS + head) * (D + E)
    dv += (b * HEADS + head) * V
    k = rows_of(k_ptr, offs_n, k_row, inside, D, D_PAD)
    v = rows_of(v_ptr, offs_n, v_row, inside, V, V_PAD)
    if ADD:  # continues the sums of the previous part
        acc_k = rows_of(dk, offs_n, dk_row, inside, D, D_PAD).to(tl.float32)
        acc_v = rows_of(dv, offs_n, dv_row, inside, V, V_PAD).to(tl.float32)
    else:
        acc_k = tl.zeros([BLOCK_N, D_PAD], tl.float32)
        acc_v = tl.zeros([BLOCK_N, V_PAD], tl.float32)
    if E > 0:
        k_2 = rows_of(k_ptr + D, offs_n, k_row, inside, E, E_PAD)
        if ADD:
            acc_k_2 = rows_of(dk + D, offs_n, dk_row, inside, E, E_PAD).to(tl.float32)
        else:
            acc_k_2 = tl.zeros([BLOCK_N, E_PAD], tl.float32)
    word = bits + (b * tiles * BLOCK_N + offs_n) * words
    head_lse = (b * HEADS + head) * sq
    lists += (b * tiles + tile) * others
    tile_m = tl.load(lists)
    for step in range(0, tl.load(counts + b * tiles + tile)):
        next_m = tl.load(lists + step + 1)
        offs_m = q0 + tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        q = rows_of(q_ptr, offs_m, q_row, offs_m < sq, D, D_PAD)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")
        if E > 0:
            q_2 = rows_of(q_ptr + D, offs_m, q_row, offs_m < sq, E, E_PAD)
            s = tl.dot(k_2, tl.trans(q_2), s, input_precision="ieee")
        do = rows_of(do_ptr, offs_m, g_row, offs_m < sq, V, V_PAD)
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        lse_i = tl.load(lse + head_lse + offs_m, mask=offs_m < sq, other=float("inf"))
        delta = tl.load(delta_ptr + head_lse + offs_m, mask=offs_m < sq, other=0.0)
        chosen_nm = chosen(word + tile_m * (BLOCK_M // BITS), tl.arange(0, BLOCK_M), BITS)
        p = tl.where(chosen_nm, tl.exp2(s * scale - lse_i[None, :]), 0.0)
        acc_v = product(p, do, acc_v, SPLIT_P)
        ds = p * (dp - delta[None, :])
        acc_k = product(ds, q, acc_k, SPLIT_DS)
        if E > 0:
            acc_k_2 = product(ds, q_2, acc_k_2, SPLIT_DS)
        tile_m = next_m
    _store(dk, acc_k, offs_n, inside, dk_row, dk_factor, D, D_PAD)
    if E > 0:
        _store(dk + D, acc_k_2, offs_n, inside, dk_row, dk_factor, E, E_PAD)
    _store(dv, acc_v, offs_n, inside, dv_row, 1.0, V, V_PAD)


@on_its_device
@triton.jit
def _shared_kernel(
    shares, out, rows, HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the contributions of all heads, `[rows, heads, D]`, in a fixed order."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    for head in range(0, HEADS):
        acc += rows_of(shares + head * D, row, HEADS * D, row < rows, D, D_PAD)
    _store(out, acc, row, row < rows, D, 1.0, D, D_PAD)


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
            REST=rest is not None, **self._common(), **tile.options(),
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
            SPLIT_DS=SPLIT_DS, **heads._common(), **heads.tiles.query.options(),
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
            ADD=first > 0, SPLIT_P=SPLIT_P, SPLIT_DS=SPLIT_DS, **heads._common(),
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
