"""DSA's sparse attention: each query attends to the keys that the indexer chose for it.

Absorbed (one latent key for all heads, whose first columns are the value) and with a key per head,
which take different kernels:

- `dsa_attention_forward_triton`, `dsa_attention_backward_triton`: one program for each query
  gathers its keys for all heads. Products are keys by heads, so that few heads fill a tensor core's
  tile. `dsa_attention_wide_triton` has those of latents beyond 128 columns, heads by keys.
- `dsa_attention_per_head_triton`: a key per head leaves gathered rows no matrix to be part of. All
  tiles in which some query chose some key are multiplied, restricted by one bit for each key.

Nothing of size `[b, heads, sq, sk]` exists, and no gathered key is written to memory. The backward
keeps the inputs, the indices, the log-sum-exp of each row and the output in two terms: delta, the
product of the output and its gradient, is formed from both, in fp32.

The output and the gradient of the queries repeat bit for bit, whatever the batch they are part of.
So does that of per-head keys. The gradient of absorbed keys is added up by fp32 atomics, unless
torch's deterministic mode is on (Megatron's `--deterministic-mode`): then each query's contribution
is written once and summed in order, in at most 256 MiB of scratch memory (wide latents: 1 GiB).
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from cppmega.ops import dsa_attention_reference as reference
from cppmega.ops.dsa_attention_problem import Absorbed, is_wide
from cppmega.ops.dsa_attention_wide_tiles import wide_obstacle
from cppmega.ops.dsa_indexer_device import Gpu, gpu_obstacle, gpu_of
from cppmega.ops.dsa_indexer_problem import Bounds


def obstacle(query: Tensor, key: Tensor, value: Tensor | int) -> str | None:
    """Why the kernels cannot do a call, as half a sentence; None if they can.

    Args:
        query: `[sq, b, heads, d]`.
        key: `[sk, b, heads or 1, d]`.
        value: `[sk, b, heads or 1, v]`; or how many of the key's columns it is.
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
    """Why no kernel does a latent key of these widths, as half a sentence; None if one does.

    Args:
        heads: of this rank.
        width: of queries and keys.
        value_width: of the values, the first columns of the keys.
        gpu: that is to do it.
    """
    rotary = width - value_width
    if not is_wide(value_width, rotary):
        return None
    return wide_obstacle(heads, value_width, rotary, gpu)


def per_head_obstacle(width: int, value_width: int) -> str | None:
    """Why no kernel does keys and values of these widths per head; None if one does."""
    if max(width, value_width) > 256:
        return f"keys of {width} with values of {value_width}: the kernels do at most 256 of each"
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
        value: `[sk, b, heads or 1, v]`; or, absorbed, how many of the key's columns it is.
        indices: `[b, sq, topk]`, integers in any order, each key at most once in a row; an entry
            outside of `0 <= key < sk`, -1 for one, is not a key.
        softmax_scale: of the products.
        bounds: which keys a query may see, of those that are chosen; causal without.
        repeatable: sum the gradient of the keys in one order; None asks torch's deterministic mode.

    Returns:
        `[sq, b, heads, v]` in the type of the query, 0 for a query that sees no key.

    Raises:
        ValueError: `indices` is not `[b, sq, topk]`, or the widths do not match.
    """
    _check(query, key, value, indices)
    starts, ends = bounds or Bounds()
    if obstacle(query, key, value) is None:
        if isinstance(value, int):
            from cppmega.ops.dsa_attention_autograd import absorbed

            call = Absorbed(query, key, value, indices, softmax_scale, starts, ends)
            return absorbed(call, repeatable=repeatable)
        from cppmega.ops.dsa_attention_per_head import per_head

        return per_head(query, key, value, indices, softmax_scale, starts, ends)
    values = key[..., :value] if isinstance(value, int) else value
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
