"""DSA's sparse attention: each query attends to the keys that the indexer chose for it.

Absorbed (one latent key for all heads, whose first columns are the value) and with a key per head,
which take different kernels:

- `dsa_attention_forward_triton` and `dsa_attention_backward_triton`: one program for each query
  gathers its keys once, for all heads. Products are keys by heads, so that few heads fill a tensor
  core's tile.
- `dsa_attention_per_head_triton`: a key per head leaves gathered rows no matrix to be part of. All
  tiles in which some query chose some key are multiplied, restricted by one bit for each key.

Nothing of size `[b, heads, sq, sk]` exists, and no gathered key is written to memory. The backward
keeps inputs, indices, the output and the log-sum-exp of each row; the sum that softmax's gradient
subtracts (delta) is formed in fp32. Gradients of keys are summed in one order, so all results
repeat bit for bit, whatever the batch they are part of.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from cppmega.ops import dsa_attention_reference as reference
from cppmega.ops.dsa_indexer_device import gpu_obstacle
from cppmega.ops.dsa_indexer_problem import Bounds


def obstacle(query: Tensor, key: Tensor, value: Tensor | None = None) -> str | None:
    """Why the kernels cannot do a call; None if they can.

    Args:
        query: `[sq, b, heads, d]`.
        key: `[sk, b, heads or 1, d]`.
        value: `[sk, b, heads or 1, v]`; None where it is the first columns of the key.
    """
    if query.device.type != "cuda":
        return f"the tensors are on {query.device.type}"
    types = {x.dtype for x in (query, key, value) if x is not None}
    if types not in ({torch.bfloat16}, {torch.float16}):
        return f"tensors are {' and '.join(sorted(map(str, types)))}, not all bf16 or all fp16"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return gpu_obstacle(query.device)


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | int,
    indices: Tensor,
    softmax_scale: float,
    *,
    bounds: Bounds | None = None,
) -> Tensor:
    """Attend to the chosen keys.

    Args:
        query: `[sq, b, heads, d]`.
        key: `[sk, b, 1, d]`, or `[sk, b, heads, d]`.
        value: `[sk, b, heads or 1, v]`; or, absorbed, how many of the key's columns it is.
        indices: `[b, sq, topk]`, integers in any order, each key at most once in a row; an entry
            outside of `0 <= key < sk`, -1 for one, is not a key.
        softmax_scale: of the products.
        bounds: which keys a query may see, of those that are chosen; causal without.

    Returns:
        `[sq, b, heads, v]` in the type of the query, 0 for a query that sees no key.

    Raises:
        ValueError: `indices` is not `[b, sq, topk]`, or the widths do not match.
    """
    absorbed = isinstance(value, int)
    _check(query, key, value, indices)
    starts, ends = bounds or Bounds()
    if obstacle(query, key, None if absorbed else value) is None:
        from cppmega.ops import dsa_attention_autograd as kernels

        if absorbed:
            return kernels.absorbed(query, key, value, indices, softmax_scale, starts, ends)
        return kernels.per_head(query, key, value, indices, softmax_scale, starts, ends)
    values = key[..., :value] if absorbed else value
    seen = reference.visible(indices, key.size(0), starts, ends)
    return reference.attention(query, key, values, indices, seen, softmax_scale)


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
