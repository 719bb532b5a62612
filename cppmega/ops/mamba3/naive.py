"""Mamba-3 in plain torch: the definition of the kernels' results, on any device, in fp64 or fp32.

A state of `[n, p]` per head follows the trapezoidal rule of arXiv 2603.15569,

    S_t = a_t S_{t-1} + (1 - trap_t) dt_t a_t k_{t-1} v_{t-1}^T + trap_t dt_t k_t v_t^T,

with `a_t = exp(A_t dt_t)`. Keys (B) and queries (C) are normalized, shifted by biases, and rotated
by an angle that accumulates `pi tanh(angle) dt` from the start of a document. With rank R (MIMO), a
token has R keys and queries and, through elementwise weights, R values; the state is the sum over
all R.

`definition` selects the function that computes A. `softplus` is that of mamba-ssm 2.3.2.post1;
`heavy_tail` is that of its main branch since https://github.com/state-spaces/mamba/pull/962, with
which the same parameters yield different outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cppmega.ops.common.numerics import wide

Definition = Literal["softplus", "heavy_tail"]

A_FLOOR = 1e-4
"""Lower bound of -A, so that a state always decays."""
EPSILON = 1e-5
"""Added to the mean square before the root."""


class Inputs(NamedTuple):
    """The projections of the tokens, with h heads in g groups, R ranks and k angles.

    Attributes:
        z: `[b, l, h, p]`, the gate.
        x: `[b, l, h, p]`.
        keys: `[b, l, g, R, n]`, called B in the paper.
        queries: `[b, l, g, R, n]`, called C.
        dt: `[b, l, h]`, before bias and softplus.
        decay: `[b, l, h]`, before the function that the definition names.
        trap: `[b, l, h]`, before the sigmoid.
        angles: `[b, l, k]`, before tanh; shared by all heads.
    """

    z: Tensor
    x: Tensor
    keys: Tensor
    queries: Tensor
    dt: Tensor
    decay: Tensor
    trap: Tensor
    angles: Tensor


class Parameters(NamedTuple):
    """The parameters of a mixer besides its projections.

    Attributes:
        dt_bias: `[h]`.
        d: `[h]`, the factor of the skip connection from a value to the output.
        key_bias: `[h, R, n]`.
        query_bias: `[h, R, n]`.
        key_norm: `[n]`.
        query_norm: `[n]`.
        rank_x: `[h, R, p]`, the weights that expand x to R values; None: SISO, which is R = 1.
        rank_z: `[h, R, p]`, the same for the gate.
        rank_out: `[h, R, p]`, the weights of the sum over R outputs.
        out_norm: `[h * p]`, the weight of a norm per head before the gate; None: no norm.
    """

    dt_bias: Tensor
    d: Tensor
    key_bias: Tensor
    query_bias: Tensor
    key_norm: Tensor
    query_norm: Tensor
    rank_x: Tensor | None = None
    rank_z: Tensor | None = None
    rank_out: Tensor | None = None
    out_norm: Tensor | None = None


def mixed(
    inputs: Inputs,
    parameters: Parameters,
    definition: Definition = "softplus",
    bounds: Sequence[int] | None = None,
    chunk: int = 64,
) -> Tensor:
    """The gated output `[b, l, h, p]` of all heads, in the type of x.

    Args:
        inputs: computed in fp64 if x is fp64, otherwise in fp32.
        parameters: on the same device.
        definition: the definition of A.
        bounds: where the documents of a pack begin, and where the last one ends, as cumulative
            lengths; tokens after the end form a separate document. None: every sequence is one.
        chunk: tokens between two computed states; no result depends on it.
    """
    length = inputs.x.size(1)
    ends = sorted({0, length, *(bound for bound in bounds or () if bound < length)})
    parts = [
        _document(Inputs(*(each[:, start:end] for each in inputs)), parameters, definition, chunk)
        for start, end in itertools.pairwise(ends)
    ]
    return torch.cat(parts, 1).to(inputs.x.dtype)


def without_tokens(inputs: Inputs, parameters: Parameters) -> Tensor:
    """The output for no tokens, with gradients of zeros, since a reduction may wait for them."""
    given = [each for each in (*inputs, *parameters) if each is not None]
    return inputs.x + 0 * sum(each.sum().to(inputs.x.dtype) for each in given)


def _document(inputs: Inputs, parameters: Parameters, definition: Definition, chunk: int) -> Tensor:
    token = Inputs(*map(wide, inputs))
    given = parameters._asdict().items()
    learned = Parameters(**{name: wide(each) for name, each in given if each is not None})
    dt = functional.softplus(token.dt + learned.dt_bias)
    log_a = -decay_rate(token.decay, definition) * dt
    theta = torch.cumsum(math.pi * torch.tanh(token.angles).unsqueeze(2) * dt.unsqueeze(-1), 1)
    pairwise = learned.rank_x is None
    keys, queries = (
        rotated(_of_heads(normed(each, norm), bias), theta, pairwise)
        for each, norm, bias in (
            (token.keys, learned.key_norm, learned.key_bias),
            (token.queries, learned.query_norm, learned.query_bias),
        )
    )
    values = _ranks(token.x, learned.rank_x)
    out = scan(queries, keys, values, log_a, dt, torch.sigmoid(token.trap), chunk)
    out = out + learned.d[:, None, None] * values
    if learned.out_norm is not None:
        out = normed(out, learned.out_norm.view(*token.x.shape[-2:]).unsqueeze(1))
    out = out * functional.silu(_ranks(token.z, learned.rank_z))
    if learned.rank_out is not None:
        out = out * learned.rank_out
    return out.sum(3)


def decay_rate(decay: Tensor, definition: Definition) -> Tensor:
    """-A, at least `A_FLOOR`."""
    if definition == "softplus":
        rate = functional.softplus(decay)
    else:  # 1 + x above zero, 1 / (1 - x) below
        # Releases of torch differ in the derivative of `clamp` at its bound.
        negative = torch.where(decay > 0, 0.0, decay)
        rate = torch.where(decay > 0, 1 + decay, torch.reciprocal(1 - negative))
    return rate.clamp_min(A_FLOOR)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def _of_heads(x: Tensor, bias: Tensor) -> Tensor:
    """`[b, l, h, R, n]` from groups `[b, l, g, R, n]`, each of which serves consecutive heads."""
    return x.repeat_interleave(len(bias) // x.size(2), 2) + bias


def _ranks(x: Tensor, weight: Tensor | None) -> Tensor:
    """`[b, l, h, R, p]` from `[b, l, h, p]`."""
    x = x.unsqueeze(3)
    return x if weight is None else x * weight


def rotated(x: Tensor, theta: Tensor, pairwise: bool) -> Tensor:
    """Rotate pairs of `[b, l, h, R, n]` by `[b, l, h, k]`, k <= n / 2.

    Args:
        x: keys or queries.
        theta: the angles of the first k pairs; the others are left as they are.
        pairwise: a pair consists of two adjacent elements, as in mamba-ssm's SISO kernels;
            otherwise of an element of the first half and one of the second, as in its MIMO kernels.
    """
    pairs = x.size(-1) // 2
    cos = functional.pad(torch.cos(theta), (0, pairs - theta.size(-1)), value=1.0).unsqueeze(3)
    sin = functional.pad(torch.sin(theta), (0, pairs - theta.size(-1))).unsqueeze(3)
    split = x.reshape(*x.shape[:-1], *((pairs, 2) if pairwise else (2, pairs)))
    axis = -1 if pairwise else -2
    first, second = split.unbind(axis)
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), axis)
    return turned.flatten(-2)


def halved(x: Tensor) -> Tensor:
    """Columns n that are paired in halves, from columns whose first half are adjacent pairs.

    A scan whose keys and queries are both reordered so computes the same, since they only meet in
    products over their columns.
    """
    rotated_columns, *others = x.split([x.size(-1) // 2, *[x.size(-1) // 4] * 2], -1)
    first, second = rotated_columns.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat((first, others[0], second, others[1]), -1)


def interleaved(x: Tensor) -> Tensor:
    """The inverse of `halved`."""
    first, plain, second, other = x.chunk(4, -1)
    return torch.cat((torch.stack((first, second), -1).flatten(-2), plain, other), -1)


def scan(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_a: Tensor,
    dt: Tensor,
    trap: Tensor,
    chunk: int,
) -> Tensor:
    """`S_t^T q_t`, `[b, l, h, R, p]`, of one document.

    Args:
        queries: `[b, l, h, R, n]`.
        keys: `[b, l, h, R, n]`.
        values: `[b, l, h, R, p]`.
        log_a: `[b, l, h]`, at most 0.
        dt: `[b, l, h]`.
        trap: `[b, l, h]`, between 0 and 1.
        chunk: tokens between two computed states.
    """
    now = trap * dt
    # A token's contribution to the next step, to which later tokens apply their own decay.
    next_step = functional.pad(((1 - trap) * dt)[:, 1:], (0, 0, 0, 1))
    state = queries.new_zeros(*keys.shape[:1], keys.size(2), keys.size(-1), values.size(-1))
    outputs = []
    for q, k, v, log, at_once, later in zip(
        *(
            torch.split(each, chunk, 1)
            for each in (queries, keys, values, log_a, now, now + next_step)
        ),
        strict=True,
    ):
        since = log.cumsum(1)
        length = log.size(1)
        between = since.unsqueeze(2) - since.unsqueeze(1)  # [b, t, s, h]
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        weight = torch.exp(between.masked_fill(~seen[..., None], -math.inf)) * later.unsqueeze(1)
        itself = torch.eye(length, dtype=torch.bool, device=q.device)[..., None]
        weight = torch.where(itself, at_once.unsqueeze(1), weight)
        scores = torch.einsum("bthRn,bshrn->bhtRsr", q, k)
        within = torch.einsum("bhtRsr,btsh,bshrp->bthRp", scores, weight, v)
        carried = torch.einsum("bthRn,bhnp,bth->bthRp", q, state, torch.exp(since))
        outputs.append(within + carried)
        left = torch.exp(since[:, -1:] - since) * later
        state = torch.exp(since[:, -1])[..., None, None] * state
        state = state + torch.einsum("bshrn,bsh,bshrp->bhnp", k, left, v)
    return torch.cat(outputs, 1)
