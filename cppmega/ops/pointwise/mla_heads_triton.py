"""`mla_heads_naive`'s keys and values, and the gradient of their common projection.

Grid: blocks of tokens x blocks of heads, as in `rope_triton`. A program copies whole rows between
the projection on one side and the keys and values on the other, and reads the columns that all
heads share once for its heads. Each element is read and written once, so memory bandwidth limits
both kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cppmega.ops.common.launch import on_its_device
from cppmega.ops.pointwise.rope_triton import copy_columns, padded, tile


@on_its_device
@triton.jit
def _key_value_kernel(
    kv, shared, key, value, tokens, b, heads, kv_s, kv_b, kv_h,
    D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    D_PAD: tl.constexpr, R_PAD: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    inside = (token < tokens)[:, None, None] & (head < heads)[None, :, None]
    row = token[:, None, None] * heads + head[None, :, None]
    from_token = token // b * kv_s + token % b * kv_b
    from_row = kv + from_token[:, None, None] + (head * kv_h)[None, :, None]
    key_row = key + row * (D + R)
    copy_columns(from_row, key_row, inside, D, D_PAD)
    copy_columns(from_row + D, value + row * V, inside, V, V_PAD)
    if R > 0:
        column = tl.arange(0, R_PAD)[None, None, :]
        mask = (token < tokens)[:, None, None] & (column < R)
        last = tl.load(shared + token[:, None, None] * R + column, mask=mask, other=0.0)
        last = tl.broadcast_to(last, (TOKENS, HEADS, R_PAD))
        tl.store(key_row + D + column, last, mask=inside & (column < R))


@on_its_device
@triton.jit
def _kv_gradient_kernel(
    of_key, of_value, out, tokens, b, heads, key_s, key_b, key_h, value_s, value_b, value_h,
    D: tl.constexpr, V: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    D_PAD: tl.constexpr, V_PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    inside = (token < tokens)[:, None, None] & (head < heads)[None, :, None]
    to_row = out + (token[:, None, None] * heads + head[None, :, None]) * (D + V)
    s, b_at = token // b, token % b
    key_token, value_token = s * key_s + b_at * key_b, s * value_s + b_at * value_b
    from_key = of_key + key_token[:, None, None] + (head * key_h)[None, :, None]
    from_value = of_value + value_token[:, None, None] + (head * value_h)[None, :, None]
    copy_columns(from_key, to_row, inside, D, D_PAD)
    copy_columns(from_value, to_row + D, inside, V, V_PAD)


@torch.library.custom_op("cppmega::mla_key_value", mutates_args=("key", "value"))
def key_value(kv: Tensor, shared: Tensor, key: Tensor, value: Tensor) -> None:
    """Write the keys, whose last columns all heads share, and the values.

    Args:
        kv: `[s, b, heads, d + v]` with a last stride of 1.
        shared: `[s, b, 1, r]`, contiguous, of the type of `kv`, already rotated.
        key: `[s, b, heads, d + r]`, contiguous, of the type of `kv`.
        value: `[s, b, heads, v]`, contiguous, of the type of `kv`.
    """
    s, b, heads, columns = kv.shape
    r, v = shared.size(-1), value.size(-1)
    if s * b * heads:
        tokens, at_a_time = tile(heads, columns)
        _key_value_kernel[(triton.cdiv(s * b, tokens), triton.cdiv(heads, at_a_time))](
            kv, shared, key, value, s * b, b, heads, kv.stride(0), kv.stride(1), kv.stride(2),
            D=columns - v, R=r, V=v, TOKENS=tokens, HEADS=at_a_time, D_PAD=padded(columns - v),
            R_PAD=padded(r), V_PAD=padded(v), num_warps=4,
        )  # fmt: skip


@torch.library.custom_op("cppmega::mla_kv_gradient", mutates_args=("out",))
def kv_gradient(of_key: Tensor, of_value: Tensor, out: Tensor) -> None:
    """Write the gradient of `kv`, without that of the columns that all heads share.

    Args:
        of_key: the gradient of the key, `[s, b, heads, d + r]` with a last stride of 1.
        of_value: that of the value, `[s, b, heads, v]` with a last stride of 1.
        out: `[s, b, heads, d + v]`, contiguous, of the type of both.
    """
    s, b, heads, columns = out.shape
    v = of_value.size(-1)
    if out.numel():
        tokens, at_a_time = tile(heads, columns)
        _kv_gradient_kernel[(triton.cdiv(s * b, tokens), triton.cdiv(heads, at_a_time))](
            of_key, of_value, out, s * b, b, heads, *of_key.stride()[:3], *of_value.stride()[:3],
            D=columns - v, V=v, TOKENS=tokens, HEADS=at_a_time, D_PAD=padded(columns - v),
            V_PAD=padded(v), num_warps=4,
        )  # fmt: skip
