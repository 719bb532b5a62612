"""Manifold-constrained hyper-connections in plain torch, on any device: the definition.

n residual streams replace the single one of a transformer. A site, which is one sub-layer, reads
their weighted sum and writes back to all of them, after mixing them by a nearly doubly stochastic
matrix (arXiv 2512.24880, equations 5 to 9). All weights depend on the token.

Variants differ, and a model trained in one is a different model in another. This is the variant of
Megatron's branch dev, at d48bd6be0a and unchanged since d8b71082ea (#6172), and of #6401 for 0.20,
at 2651afeebe:

- The mapping reads the streams in fp32, with fp32 parameters, and its norm is
  `r = 1 / (|x| / sqrt(nC) + 1e-6)`, without a weight, and with the epsilon outside the root.
- `h_pre` is a sigmoid plus 1e-6, `h_post` twice a sigmoid.
- Sinkhorn begins with a softmax over the last axis plus 1e-6, then normalizes columns, then rows
  and columns in turn, each time dividing by the sum plus 1e-6: columns are those that sum to one.
- The streams are mixed by the transpose of `h_res`.

The weights stay in fp32, where dev rounds them to the type of the streams. For fp32 streams this
makes no difference, and weights, aggregation and update were found bitwise identical to both.
Otherwise results are computed in fp32 and rounded once; in fp64 everything is fp64. Gradients come
from autograd.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cppmega.ops.common.numerics import wide

EPS = 1e-6
"""Epsilon of the norm, of `h_pre` and of every step of Sinkhorn."""


class Parameters(NamedTuple):
    """The parameters of a site, in fp32; shapes and output order as in Megatron's state dict.

    Attributes:
        phi: `[n * n + 2 * n, n * C]`, `mapping_proj.weight`: rows of `h_pre`, `h_post`, `h_res`.
        alpha_pre: `[1]`, the scale of the logits of `h_pre`.
        alpha_post: `[1]`, the scale of the logits of `h_post`.
        alpha_res: `[1]`, the scale of the logits of `h_res`.
        bias: `[n * n + 2 * n]`, the bias of all logits.
    """

    phi: Tensor
    alpha_pre: Tensor
    alpha_post: Tensor
    alpha_res: Tensor
    bias: Tensor


class Weights(NamedTuple):
    """The weights of a site for each token, in fp32 (fp64 for streams in fp64).

    Attributes:
        h_pre: `[s, b, n]`, weights of the streams in the input of the sub-layer.
        h_post: `[s, b, n]`, weights of the sub-layer's output in the streams.
        h_res: `[s, b, n, n]`, weights of stream i (before) in stream j (after).
    """

    h_pre: Tensor
    h_post: Tensor
    h_res: Tensor


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Nearly doubly stochastic matrices from `logits` `[..., n, n]`, in their type.

    Sums over the second-to-last axis are 1; those over the last axis approach 1 with `iterations`,
    of which there must be at least one.
    """
    out = logits.softmax(-1) + EPS
    out = out / (out.sum(-2, keepdim=True) + EPS)
    for _ in range(iterations - 1):
        out = out / (out.sum(-1, keepdim=True) + EPS)
        out = out / (out.sum(-2, keepdim=True) + EPS)
    return out


def logits(streams: Tensor, parameters: Parameters) -> Tensor:
    """The `[s, b, n * n + 2 * n]` values before sigmoids and Sinkhorn (equation 7)."""
    x = wide(streams).flatten(-2)
    n = streams.size(-2)
    phi, alpha_pre, alpha_post, alpha_res, bias = (each.to(x.dtype) for each in parameters)
    r = 1.0 / (x.norm(dim=-1, keepdim=True) / math.sqrt(x.size(-1)) + EPS)
    alpha = torch.cat((alpha_pre.expand(n), alpha_post.expand(n), alpha_res.expand(n * n)))
    out: Tensor = r * (x @ phi.t()) * alpha + bias
    return out


def weights(streams: Tensor, parameters: Parameters, iterations: int) -> Weights:
    """The weights of a site from its streams `[s, b, n, C]` (equation 8)."""
    n = streams.size(-2)
    pre, post, res = logits(streams, parameters).tensor_split((n, 2 * n), dim=-1)
    return Weights(
        pre.sigmoid() + EPS,
        post.sigmoid() * 2,
        sinkhorn(res.reshape(*res.shape[:-1], n, n), iterations),
    )


def aggregate(streams: Tensor, h_pre: Tensor) -> Tensor:
    """The input `[s, b, C]` of the sub-layer, in the type of the streams `[s, b, n, C]`."""
    x = wide(streams)
    return (x * h_pre.to(x.dtype).unsqueeze(-1)).sum(-2).to(streams.dtype)


def update(
    streams: Tensor,
    h_res: Tensor,
    h_post: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """The streams after the sub-layer, `[s, b, n, C]` in their type.

    Args:
        streams: `[s, b, n, C]`, as the site read them.
        h_res: `[s, b, n, n]`; stream j receives `h_res[i, j]` of stream i.
        h_post: `[s, b, n]`.
        out: `[s, b, C]`, output of the sub-layer.
        bias: `[C]`, which the sub-layer left for its caller to add.
        dropout: the probability with which a value is not added to a stream; each stream has its
            own random numbers, as in dev.
    """
    x = wide(streams)
    h_res, h_post = h_res.to(x.dtype), h_post.to(x.dtype).unsqueeze(-1)
    mixed = h_res.transpose(-1, -2) @ x
    added = h_post * out.to(x.dtype).unsqueeze(-2)
    if bias is not None:
        added = added + h_post * bias.to(x.dtype)
    if dropout:
        added = torch.nn.functional.dropout(added, dropout)
    return (added + mixed).to(streams.dtype)
