"""The recurrence of M2RNN in plain torch, on any device: the definition (arXiv 2603.14360).

A head has a state of k rows and v columns. Its step is non-linear, so that it can only be computed
in time order:

    h[t] = f[t] * h[t - 1] + (1 - f[t]) * tanh(h[t - 1] @ W + outer(k[t], v[t]))
    y[t] = q[t] @ h[t]

All heads share one query and one key; each has its own value, transition W and decay f. The decay
is given as its logarithm, which remains exact where f is so close to 1 that it would round to 1.
States start at zero, in packed sequences at the beginning of every document.

Everything is computed in fp32 and rounded once; in fp64 everything is fp64. Gradients come from
autograd, with one exception. Transitions are unbounded, and the gradient of a state can grow in
every step back through time until it overflows. The authors clip it in each step, and so does this
with `gradient_clipping`: the gradient of `h[t]`, which is the sum of those through `y[t]` and
through `h[t + 1]`, is clamped element by element to `[-gradient_clipping, gradient_clipping]`
before anything is computed from it.

That is the authors' definition in plain torch, `xma/layers/m2rnn/torch_implementation.py` of
open-lm-engine/accelerated-model-architectures at 384ed0a. Their Triton kernel clamps the gradient
through `h[t + 1]` and then adds that through `y[t]`. The configurations that they published, in
`configs/research/m2rnn` of open-lm-engine/lm-engine, clip at 1.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from cppmega.ops.common.numerics import wide


def m2rnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transition: Tensor,
    log_decay: Tensor,
    bounds: Tensor | None = None,
    gradient_clipping: float | None = None,
) -> Tensor:
    """Compute the recurrence, step by step.

    Args:
        q: `[s, b, K]`.
        k: `[s, b, K]`.
        v: `[s, b, heads, V]`.
        transition: `[heads, V, V]`, by which states are multiplied from the right.
        log_decay: `[s, b, heads]`, not above 0; fp32 (fp64).
        bounds: `[documents + 1]`, where documents begin and the last one ends, ascending; None:
            each of the b sequences is one document.
        gradient_clipping: the largest element of a state's gradient, above 0; None: any.

    Returns:
        `[s, b, heads, V]` in the type of v.
    """
    s, b, heads, width = v.shape
    begins = torch.zeros(s + 1, dtype=torch.bool, device=v.device)
    if bounds is not None:
        begins = begins.index_fill(0, bounds.long(), True)
    decay, fresh = log_decay.exp()[..., None, None], -torch.expm1(log_decay)[..., None, None]
    query, key, value, weight = wide(q), wide(k), wide(v), wide(transition)
    state = value.new_zeros(b, heads, k.size(-1), width)
    found = []
    for t in range(s):
        state = state.masked_fill(begins[t], 0)
        outer = key[t, :, None, :, None] * value[t, :, :, None, :]
        state = decay[t] * state + fresh[t] * torch.tanh(state @ weight + outer)
        if gradient_clipping is not None and state.requires_grad:
            bound = partial(torch.clamp, min=-gradient_clipping, max=gradient_clipping)
            state.register_hook(bound)
        found.append(torch.einsum("bk,bhkv->bhv", query[t], state))
    if not found:  # empty, and yet a function of all inputs, whose gradients are zeros
        return (value * ((query * key).sum() + weight.sum() + log_decay.sum())).to(v.dtype)
    return torch.stack(found).to(v.dtype)
