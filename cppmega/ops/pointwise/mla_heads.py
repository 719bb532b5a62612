"""MLA's queries, keys and values of each head from their projections, in one kernel each way.

`mla_heads_naive` defines it. Megatron rotates and joins the parts of queries and of keys one after
the other, so that both are written twice, and so are their gradients. Here the query takes one
launch per direction, and the key and the value together another. Results and gradients are the same
to the bit.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, autograd

from cppmega.ops.common.device import contiguous_rows
from cppmega.ops.common.once_differentiable import once_differentiable
from cppmega.ops.pointwise import rope


def obstacle(q: Tensor, kv: Tensor, k_pos: Tensor, angles: Tensor) -> str | None:
    """Why the kernels do not support a call on a GPU, as a clause; None if they do."""
    reason = rope.obstacle(k_pos, angles, False, True)
    if reason is not None:
        return reason
    if not q.dtype == kv.dtype == k_pos.dtype:
        return f"queries of {q.dtype} meet keys of {kv.dtype} and {k_pos.dtype}"
    plain = q.size(-1) - k_pos.size(-1)
    fits = q.dim() == kv.dim() == 4 and q.shape[:3] == kv.shape[:3]
    if not fits or k_pos.shape[:3] != (*q.shape[:2], 1) or not 0 <= plain <= kv.size(-1):
        return f"{list(q.shape)}, {list(kv.shape)} and {list(k_pos.shape)} do not make heads"
    return None


def query_key_value(
    q: Tensor, kv: Tensor, turned: Tensor, angles: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `mla_heads_naive.query_key_value` with the kernels.

    Args:
        q: `[s, b, heads, d + r]`, bf16, fp16 or fp32, with any strides.
        kv: `[s, b, heads, d + v]`, of the type of q, with any strides.
        turned: `[s, b, 1, r]`, rotated, of the type of q, with any strides.
        angles: fp32 `[s, 1, 1, w]`, w <= r; no gradient.
        scale: factor of cos and sin.

    Returns:
        The query `[s, b, heads, d + r]`, the key `[s, b, heads, d + r]` and the value
        `[s, b, heads, v]`, contiguous, each with memory of its own.
    """
    plain = q.size(-1) - turned.size(-1)
    query = rope.rotated(q, angles, gathered=True, scale=scale, start=plain)
    key, value = _KeyValue.apply(kv, turned, plain)
    return query, key, value


class _KeyValue(autograd.Function):
    @staticmethod
    def forward(ctx: Any, kv: Tensor, turned: Tensor, plain: int) -> tuple[Tensor, Tensor]:
        from cppmega.ops.pointwise import mla_heads_triton as kernels

        ctx.plain, ctx.shared = plain, turned.shape
        key = kv.new_empty(*kv.shape[:3], plain + turned.size(-1))
        value = kv.new_empty(*kv.shape[:3], kv.size(-1) - plain)
        kernels.key_value(contiguous_rows(kv), turned.contiguous(), key, value)
        return key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_key: Tensor, of_value: Tensor) -> tuple[Tensor | None, ...]:
        from cppmega.ops.pointwise import mla_heads_triton as kernels

        of_kv = of_key.new_empty(*of_key.shape[:3], ctx.plain + of_value.size(-1))
        kernels.kv_gradient(contiguous_rows(of_key), contiguous_rows(of_value), of_kv)
        # As the gradient of `expand` is summed, from the same strides, for the same bits.
        return of_kv, of_key[..., ctx.plain :].sum_to_size(ctx.shared), None
