"""DSA's sparse attention: each query attends to the keys that the indexer chose for it.

The absorbed form (one latent key for all heads, whose first columns are the value) and the form
with a key per head use different kernels:

- `forward_triton`, `backward_triton`: one program per query and block of heads gathers the chosen
  keys. Products are keys by heads, so that even a few heads fill a tensor core's tile.
  `wide_triton` and `wide_backward_triton` are for latents wider than 128 columns, with products
  heads by keys.
- `per_head_triton`: with a key per head, gathered rows do not form a matrix that heads share. All
  tiles in which some query chose some key are multiplied, masked by one bit per key.

No tensor of size `[b, heads, sq, sk]` is allocated, and no gathered key is written to memory. The
backward keeps the inputs, the indices, the log-sum-exp of each row, and the output as two terms:
delta, the product of the output and its gradient, is computed from both, in fp32.

The output and the gradient of the queries are bitwise reproducible, independent of the batch they
are part of. So is the gradient of per-head keys. The gradient of absorbed keys is accumulated by
fp32 atomics, unless torch's deterministic mode is on (Megatron's `--deterministic-mode`): then each
query's contribution is written once and summed in order, in at most 256 MiB of scratch memory (wide
latents: 1 GiB).
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from cppmega.ops.common.bounds import Bounds
from cppmega.ops.common.device import Gpu, gpu_obstacle, gpu_of
from cppmega.ops.common.dispatch import debugging
from cppmega.ops.dsa_attention import naive as reference
from cppmega.ops.dsa_attention.problem import Absorbed, is_wide
from cppmega.ops.dsa_attention.wide_tiles import wide_obstacle


def obstacle(query: Tensor, key: Tensor, value: Tensor | int) -> str | None:
    """Why the kernels do not support a call, as a clause; None if they do.

    Args:
        query: `[sq, b, heads, d]`.
        key: `[sk, b, heads or 1, d]`.
        value: `[sk, b, heads or 1, v]`; or the number of the key's columns that form it.
    """
    if query.device.type != "cuda":
        return f"the tensors are on {query.device.type}"
    types = {x.dtype for x in (query, key, value) if isinstance(x, Tensor)}
    if types not in ({torch.bfloat16}, {torch.float16}):
        return f"tensors are {' and '.join(sorted(map(str, types)))}, not all bf16 or all fp16"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if (too_small := gpu_obstacle(query.device)) is not None:
        return too_small
    gpu, heads = gpu_of(query.device), query.size(2)
    if isinstance(value, int):
        return absorbed_obstacle(heads, query.size(3), value, gpu)
    return per_head_obstacle(query.size(3), value.size(3))


def absorbed_obstacle(heads: int, width: int, value_width: int, gpu: Gpu) -> str | None:
    """Why no kernel supports a latent key of these widths, as a clause; None if one does.

    Args:
        heads: the number of heads on this rank.
        width: the width of queries and keys.
        value_width: the width of the values, which are the first columns of the keys.
        gpu: the GPU that is to run it.
    """
    rotary = width - value_width
    if not is_wide(value_width, rotary):
        return None
    return wide_obstacle(heads, value_width, rotary, gpu)


def per_head_obstacle(width: int, value_width: int) -> str | None:
    """Why no kernel supports per-head keys and values of these widths; None if one does."""
    if max(width, value_width) > 256:
        return (
            f"keys of {width} with values of {value_width}: the kernels support at most 256 of each"
        )
    return None


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | int,
    indices: Tensor,
    softmax_scale: float,
    *,
    bounds: Bounds | None = None,
    repeatable: bool | None = None,
) -> Tensor:
    """Attend to the chosen keys.

    Args:
        query: `[sq, b, heads, d]`.
        key: `[sk, b, 1, d]`, or `[sk, b, heads, d]`.
        value: `[sk, b, heads or 1, v]`; or, absorbed, the number of the key's columns that form it.
        indices: `[b, sq, topk]`, integers in any order; an entry outside `0 <= key < sk`, such as
            -1, is not a key. Each key occurs at most once in a row: how often a repeated one counts
            differs between kernels, and between their forward and backward. With TRITON_DEBUG=1,
            every call checks that.
        softmax_scale: factor on the products.
        bounds: which of the chosen keys a query may see; causal if omitted.
        repeatable: sum the gradient of the keys in a fixed order; None follows torch's
            deterministic mode.

    Returns:
        `[sq, b, heads, v]` in the type of the query, 0 for a query that sees no key.

    Raises:
        ValueError: `indices` is not `[b, sq, topk]`, or the widths do not match.
        RuntimeError: a key is repeated, with TRITON_DEBUG=1; on CUDA as a device-side assertion.
    """
    _check(query, key, value, indices)
    if debugging():
        _check_repeated(indices, key.size(0))
    starts, ends = bounds or Bounds()
    if obstacle(query, key, value) is None:
        if isinstance(value, int):
            from cppmega.ops.dsa_attention.autograd import absorbed

            call = Absorbed(query, key, value, indices, softmax_scale, starts, ends)
            return absorbed(call, repeatable=repeatable)
        from cppmega.ops.dsa_attention.per_head import per_head

        return per_head(query, key, value, indices, softmax_scale, starts, ends)
    values = key[..., :value] if isinstance(value, int) else value
    seen = reference.visible(indices, key.size(0), starts, ends)
    return reference.attention(query, key, values, indices, seen, softmax_scale)


def _check_repeated(indices: Tensor, sk: int) -> None:
    ordered = indices.sort(-1).values
    later = ordered[..., 1:]
    repeated = (later == ordered[..., :-1]) & (later >= 0) & (later < sk)
    torch._assert_async(
        ~repeated.any(), "sparse_attention: a key occurs more than once in a row of the indices"
    )


def _check(query: Tensor, key: Tensor, value: Tensor | int, indices: Tensor) -> None:
    sq, batch, heads, width = query.shape
    if indices.shape[:2] != (batch, sq) or indices.ndim != 3:
        raise ValueError(f"indices are {tuple(indices.shape)}, not [{batch}, {sq}, topk]")
    if key.size(3) != width or key.size(1) != batch or key.size(2) not in (1, heads):
        raise ValueError(f"keys are {tuple(key.shape)}, queries {tuple(query.shape)}")
    if isinstance(value, int):
        if key.size(2) != 1 or not 0 < value <= width:
            raise ValueError(f"a value of {value} columns of keys {tuple(key.shape)}")
    elif value.shape[:2] != key.shape[:2] or value.size(2) not in (1, heads):
        raise ValueError(f"values are {tuple(value.shape)}, keys {tuple(key.shape)}")
