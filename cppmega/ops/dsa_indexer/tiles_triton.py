"""The gradients of q, k and the head weights from a gradient G of the index scores, on CUDA.

G is `[b, queries, keys]`, padded to complete tiles, in fp16, multiplied by 2**15 (|G| <= 1 in both
losses, and values below fp16's normal range contribute nothing), for as many queries at a time as
`G_BYTES` allows. Keys that the bounds exclude for an entire tile are skipped.

- `_query_kernel`: grid (heads, tiles of queries, batch). A program holds Q and the accumulators of
  dQ and dW of one head, walks along the keys, and writes both once. G and K are read once per head.
- `_key_kernel`: grid (groups of heads, tiles of keys, batch). A program holds K and the accumulator
  of dK, walks along the queries and the heads of its group, and writes dK of the group once. Q is
  read once per tile of keys, and G once per group.

Tensor cores limit both, and products wait for the other work of their program: on an H200 they run
at 56 % (dQ and dW) and 43 % (dK) of 790 TFLOP/s (`benchmarks/results/dsa_indexer_designs.md`).
There are no atomics: every sum has a fixed order, so gradients are bitwise reproducible.

The head weights multiply the sum for dQ, not its terms, and dQ stays in fp32 until the upstream
gradient is known: the only loss of precision is one rounding of G to the type of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.bounds import RowBounds
from cppmega.ops.common.device import Gpu, contiguous_rows, gpu_of
from cppmega.ops.common.launch import on_its_device
from cppmega.ops.common.tiles_triton import extent, padded, row_bounds, rows_of

G_BYTES = 1 << 29
"""Maximum memory of G. 4096 queries at batch size 8 need 256 MiB; more are processed in parts."""

TILE = 128
"""Queries and keys of one tile; G is padded to complete tiles."""

QUERY_LAUNCH: dict[str, Any] = {"num_stages": 2, "maxnreg": 128}
"""Two programs per SM, so that the products of one overlap with the other work of the other."""

GROUPS = 4
"""Groups of heads over which dk is summed separately, so that there is work for all SMs."""


@on_its_device
@triton.jit
def _query_kernel(
    q_ptr, k_ptr, weights, g, starts, ends, factor, dq, dw, sq, sk, q0, width,
    q_row, q_batch, q_head, k_row, k_batch, w_row, w_batch, w_head, bound_batch, bound_row,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
    RELU: tl.constexpr, CAUSAL: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """dQ and dW of one head for a tile of queries."""
    b = tl.program_id(2).to(tl.int64)
    head = tl.program_id(0)
    offs_part = (tl.num_programs(1) - 1 - tl.program_id(1)) * TILE + tl.arange(0, TILE)
    offs_m = q0 + offs_part
    mask_m = offs_m < sq
    start, end = row_bounds(starts, ends, b, offs_m, sq, sk, bound_batch, bound_row, CAUSAL)
    first, last = extent(start, end)
    q = rows_of(q_ptr + b * q_batch + head * q_head, offs_m, q_row, mask_m, D, D_PAD)
    g_ptrs = g + (b * tl.num_programs(1) * TILE + offs_part)[:, None] * width
    acc_dq = tl.zeros([TILE, D_PAD], tl.float32)
    acc_dw = tl.zeros([TILE], tl.float32)
    for first_n in range(first // TILE * TILE, last, TILE):
        offs_n = first_n + tl.arange(0, TILE)
        k = rows_of(k_ptr + b * k_batch, offs_n, k_row, offs_n < sk, D, D_PAD)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        ds = tl.load(g_ptrs + offs_n[None, :]).to(tl.float32)
        if RELU:
            ds = tl.where(s > 0.0, ds, 0.0)
        acc_dw += tl.sum(ds * s, axis=1)
        acc_dq = tl.dot(ds.to(k.dtype), k, acc_dq, input_precision="ieee")
    scale = tl.load(factor) / GAIN
    w_ptrs = weights + b * w_batch + offs_m.to(tl.int64) * w_row + head * w_head
    w = tl.load(w_ptrs, mask=mask_m, other=0.0).to(tl.float32)
    offs_dw = (offs_m.to(tl.int64) * tl.num_programs(2) + b) * HEADS + head
    offs_d = tl.arange(0, D_PAD)
    tl.store(dw + offs_dw, acc_dw * scale, mask=mask_m)
    tl.store(
        dq + offs_dw[:, None] * D + offs_d[None, :],
        (acc_dq * (w * scale)[:, None]).to(dq.dtype.element_ty),
        mask=mask_m[:, None] & (offs_d < D)[None, :],
    )


@on_its_device
@triton.jit
def _key_kernel(
    q_ptr, k_ptr, weights, g, starts, ends, factor, dk, sq, sk, q0, q1, width,
    q_row, q_batch, q_head, k_row, k_batch, w_row, w_batch, w_head, bound_batch, bound_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TILE: tl.constexpr, RELU: tl.constexpr, CAUSAL: tl.constexpr, GAIN: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """The contribution of a group of heads to dK for a tile of keys, `[groups, b, sk, D]`."""
    b = tl.program_id(2).to(tl.int64)
    offs_n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    k = rows_of(k_ptr + b * k_batch, offs_n, k_row, offs_n < sk, D, D_PAD)
    rows = tl.cdiv(q1 - q0, TILE) * TILE
    acc_dk = tl.zeros([TILE, D_PAD], tl.float32)
    for first_m in range(0, rows, TILE):
        offs_part = first_m + tl.arange(0, TILE)
        offs_m = q0 + offs_part
        mask_m = offs_m < q1
        start, end = row_bounds(starts, ends, b, offs_m, sq, sk, bound_batch, bound_row, CAUSAL)
        first, last = extent(start, end)
        if (tl.program_id(1) * TILE < last) & ((tl.program_id(1) + 1) * TILE > first):
            offs_g = (b * rows + offs_part)[:, None] * width + offs_n[None, :]
            g_tile = tl.load(g + offs_g).to(tl.float32)
            for head in range(tl.program_id(0) * GROUP, tl.program_id(0) * GROUP + GROUP):
                mask_mh = mask_m & (head < HEADS)
                q = rows_of(q_ptr + b * q_batch + head * q_head, offs_m, q_row, mask_mh, D, D_PAD)
                s = tl.dot(q, tl.trans(k), input_precision="ieee")
                w_ptrs = weights + b * w_batch + offs_m.to(tl.int64) * w_row + head * w_head
                w = tl.load(w_ptrs, mask=mask_mh, other=0.0).to(tl.float32)
                ds = g_tile * w[:, None]
                if RELU:
                    ds = tl.where(s > 0.0, ds, 0.0)
                ds_t = tl.trans(ds.to(q.dtype))
                acc_dk = tl.dot(ds_t, q, acc_dk, input_precision="ieee")
    offs_d = tl.arange(0, D_PAD)
    offs_dk = (tl.program_id(0) * tl.num_programs(2) + b) * sk + offs_n
    mask = (offs_n < sk)[:, None] & (offs_d < D)[None, :]
    acc_dk *= tl.load(factor) / GAIN
    dk_ptrs = dk + offs_dk[:, None] * D + offs_d[None, :]
    if ADD:
        acc_dk += tl.load(dk_ptrs, mask=mask, other=0.0)
    tl.store(dk_ptrs, acc_dk, mask=mask)


def key_stages(width: int, gpu: Gpu) -> int:
    """The number of tiles of queries in flight for dk: three, where they fit.

    At a width of 128, three take 128 KiB of shared memory on sm_80 and sm_120, and two 96 KiB.
    """
    return 3 if width < 128 or gpu.shared > 160 * 1024 else 2


class IndexTiles:
    """The indexer's tensors of one call, and the launches that use G.

    Args:
        q: `[sq, b, heads, d]`.
        k: `[sk, b, d]`.
        weights: `[sq, b, heads]`.
        starts: first valid key of a row, `[sq]` or `[b, sq]`; None is causal.
        ends: the key after the last valid one.
        use_relu: as in the scores.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        *,
        starts: Tensor | None,
        ends: Tensor | None,
        use_relu: bool,
    ) -> None:
        q, k = contiguous_rows(q), contiguous_rows(k)
        self.q, self.k, self.weights = q, k, weights
        self.sq, self.batch, self.heads, self.width = q.shape
        self.sk = k.size(0)
        self.bounds = RowBounds.of(starts, ends, self.batch, self.sq, q)
        self.causal, self.use_relu = self.bounds.causal, use_relu
        self.tile = min(TILE, max(16, int(triton.next_power_of_2(max(self.sq, self.sk)))))
        self.columns = triton.cdiv(self.sk, self.tile) * self.tile
        self.bits = min(32, self.tile)  # keys per word, where keys are selected by bits
        # G is fp32 for fp32 inputs, whose results are not rounded to 16 bits.
        self.dtype = torch.float32 if q.dtype == torch.float32 else torch.float16
        self.gain = 1.0 if q.dtype == torch.float32 else 32768.0

    def parts(self, size: int = 2) -> list[tuple[int, int]]:
        """The first query, and the query after the last, of each part for which G is computed.

        Args:
            size: bytes per element of the largest scratch: 2 for G in fp16, 4 for a target.
        """
        rows = G_BYTES // (size * self.batch * self.columns) // self.tile * self.tile
        step = max(self.tile, rows)
        return [(first, min(self.sq, first + step)) for first in range(0, self.sq, step)]

    def scratch(self, part: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Allocate `[b, queries, keys]` for one part, both padded to complete tiles."""
        rows = triton.cdiv(part[1] - part[0], self.tile) * self.tile
        return torch.empty(self.batch, rows, self.columns, dtype=dtype, device=self.q.device)

    def empty_gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Allocate dq, the groups of dk `[groups, b, sk, d]`, and dweights, in fp32."""
        q, weights = self.q, self.weights
        dk = q.new_empty(
            min(GROUPS, self.heads), self.batch, self.sk, self.width, dtype=torch.float32
        )
        return (
            torch.empty(q.shape, dtype=torch.float32, device=q.device),
            dk,
            torch.empty(weights.shape, dtype=torch.float32, device=q.device),
        )

    def _common(self) -> dict[str, Any]:
        return {
            "HEADS": self.heads,
            "D": self.width,
            "D_PAD": padded(self.width),
            "TILE": self.tile,
            "RELU": self.use_relu,
            "CAUSAL": self.causal,
            "GAIN": self.gain,
            "num_warps": 8,
        }

    def gradients_of_queries(
        self, part: tuple[int, int], g: Tensor, factor: Tensor, dq: Tensor, dw: Tensor
    ) -> None:
        """Write the rows of one part of dq and dweights, multiplied by `factor`."""
        q, k, weights = self.q, self.k, self.weights
        _query_kernel[(self.heads, g.size(1) // self.tile, self.batch)](
            q, k, weights, g, *self.bounds[:2], factor, dq, dw,
            self.sq, self.sk, part[0], self.columns,
            *q.stride()[:3], *k.stride()[:2], *weights.stride(), *self.bounds.strides,
            **self._common(), **QUERY_LAUNCH,
        )  # fmt: skip

    def gradient_of_keys(
        self, part: tuple[int, int], g: Tensor, factor: Tensor, dk: Tensor
    ) -> None:
        """Add one part to dk `[groups, b, sk, d]`; the first part overwrites it."""
        q, k, weights = self.q, self.k, self.weights
        groups = dk.size(0)
        _key_kernel[(groups, triton.cdiv(self.sk, self.tile), self.batch)](
            q, k, weights, g, *self.bounds[:2], factor, dk,
            self.sq, self.sk, *part, self.columns,
            *q.stride()[:3], *k.stride()[:2], *weights.stride(), *self.bounds.strides,
            GROUP=triton.cdiv(self.heads, groups), ADD=part[0] > 0,
            **self._common(), num_stages=key_stages(padded(self.width), gpu_of(q.device)),
        )  # fmt: skip
